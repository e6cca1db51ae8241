"""One Valkey server and one engine for the releases of each test module."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.versions.releases import NEXT, OLDER, PREVIOUS, Release, recorded_engine, unpack
from tokentape_cli.embedded import EmbeddedValkey

Start = Callable[[str, str], Release]


@pytest.fixture(scope="session")
def previous_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack(PREVIOUS, tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="session")
def older_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack(OLDER, tmp_path_factory.mktemp("older"))


@pytest.fixture
def server() -> Iterator[EmbeddedValkey]:
    """A server of the test's own: whoever stands on another queue would take its jobs."""
    with EmbeddedValkey() as valkey:
        yield valkey


@pytest.fixture
def start(server: EmbeddedValkey, tokenizer_dir: Path, tmp_path: Path) -> Iterator[Start]:
    """Gives a release, with nothing started yet, on the test's server: its name and its PYTHONPATH."""
    made: list[Release] = []
    with recorded_engine(tmp_path, tokenizer_dir) as engine_url:

        def release(name: str, pythonpath: str) -> Release:
            directory = tmp_path / name
            directory.mkdir()
            made.append(Release(server.url, engine_url, tokenizer_dir, directory, pythonpath=pythonpath))
            return made[-1]

        try:
            yield release
        finally:
            for some in made:
                some.stop()


@pytest.fixture
def previous(start: Start, previous_path: str) -> Release:
    """The release before this one."""
    return start("previous", previous_path)


@pytest.fixture
def older(start: Start, older_path: str) -> Release:
    """The last release that wrote older events."""
    return start("older", older_path)


@pytest.fixture
def current(start: Start) -> Release:
    """This release."""
    return start("current", "")


@pytest.fixture
def following(start: Start) -> Release:
    """The release after this one, which writes events that this one cannot read."""
    return start("following", str(NEXT))
