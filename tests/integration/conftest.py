"""Separate API and worker processes over a real Valkey server, and a scripted engine on loopback."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.processes import Fleet, fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def shared_engine(tokenizer_dir: Path) -> ScriptedEngine:
    return ScriptedEngine(Tokenizer.load(str(tokenizer_dir)))


@pytest.fixture
def engine(shared_engine: ScriptedEngine) -> ScriptedEngine:
    """The engine of this module's processes, with nothing scripted yet."""
    shared_engine.requests.clear()
    shared_engine.bodies.clear()
    shared_engine.texts.clear()
    shared_engine.answer = shared_engine.take_over = None
    return shared_engine


@pytest.fixture(scope="module")
def system(
    shared_engine: ScriptedEngine, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """An empty fleet on a server of its own."""
    directory = tmp_path_factory.mktemp("logs")
    with (
        EmbeddedValkey() as valkey,
        shared_engine.serve() as engine_url,
        fleet(valkey.url, engine_url, tokenizer_dir, directory) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def urls(system: Fleet) -> list[str]:
    """Two API processes and one worker process."""
    urls = [system.api()[1], system.api()[1]]
    system.assembler("--workers", "2")
    return urls


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        yield client
