"""Fixtures of the assembler's tests."""

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import fakeredis
import pytest
import redis.asyncio

from tests.assembler.support import Api, Server, WorkerProcess
from tokentape_core.store import connect
from tokentape_engine.tokenizer import small_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a real tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A Valkey server of the test's own."""
    server = Server(tmp_path)
    yield server
    server.stop()


@pytest.fixture
async def client(server: Server) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url, timeout_s=None)
    yield client
    await client.aclose()


@pytest.fixture
async def fake() -> AsyncIterator[redis.asyncio.Redis]:
    client = fakeredis.FakeAsyncRedis()
    yield client
    await client.aclose()


@pytest.fixture
def api(client: redis.asyncio.Redis) -> Api:
    return Api(client)


@pytest.fixture
def start_worker(server: Server, tokenizer: Path, tmp_path: Path) -> Iterator[Callable[[], WorkerProcess]]:
    """Starts worker processes, which are gone after the test."""
    workers: list[WorkerProcess] = []

    def start() -> WorkerProcess:
        workers.append(WorkerProcess.start(tmp_path, server.url, tokenizer))
        return workers[-1]

    yield start
    for worker in workers:
        worker.kill()
