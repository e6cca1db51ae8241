"""The stores under test: in memory, on an imitation of Redis, on a real server."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import fakeredis
import pytest
import redis.asyncio

from tokentape_cli.embedded import EmbeddedValkey
from tokentape_core.store import MemoryStore, RedisStore, Store, connect

MakeClient = Callable[[], redis.asyncio.Redis]
MakeStore = Callable[[], Store]


async def _clients(kind: str, valkey: EmbeddedValkey) -> AsyncIterator[MakeClient]:
    fake = fakeredis.FakeServer()
    clients: list[Any] = []

    def make() -> Any:
        clients.append(connect(valkey.url) if kind == "valkey" else fakeredis.FakeAsyncRedis(server=fake))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture(params=["fakeredis", "valkey"])
async def client(
    request: pytest.FixtureRequest, valkey: EmbeddedValkey
) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of each server."""
    async for make in _clients(request.param, valkey):
        yield make()


@pytest.fixture(params=["memory", "fakeredis", "valkey"])
async def make_store(request: pytest.FixtureRequest, valkey: EmbeddedValkey) -> AsyncIterator[MakeStore]:
    """Makes stores that share their streams, as processes do; on Redis each has connections of its own."""
    if request.param == "memory":
        memory = MemoryStore()
        yield lambda: memory
    else:
        async for make in _clients(request.param, valkey):
            yield lambda make=make: RedisStore(make())  # type: ignore[misc]


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """A store of each kind."""
    return make_store()
