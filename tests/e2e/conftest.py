"""The whole system as a user runs it: reference engine, API, worker and Valkey, each a process of its own."""

from collections.abc import Iterator

import pytest

from tests.support.processes import MODEL_DIR, Fleet, fleet, free_port, wait_for
from tokentape_cli.embedded import EmbeddedValkey


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A running system; `engine_url` is the reference engine's."""
    port = free_port()
    with (
        EmbeddedValkey() as valkey,
        fleet(valkey.url, f"http://127.0.0.1:{port}", MODEL_DIR, tmp_path_factory.mktemp("logs")) as running,
    ):
        engine = running.tokentape("engine", "--port", str(port), "--model-dir", str(MODEL_DIR))
        wait_for(f"{running.engine_url}/health", engine, timeout_s=110)
        running.assembler()
        yield running


@pytest.fixture(scope="session")
def url(system: Fleet) -> str:
    """The API's URL."""
    return system.api()[1]
