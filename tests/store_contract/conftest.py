"""The stores under test: in memory, on an imitation of Redis, on a real server, on a cluster."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import fakeredis
import pytest
import redis.asyncio

from tests.support.topologies import cluster
from tokentape_core.store import MemoryStore, RedisStore, Store, connect

MakeClient = Callable[[], redis.asyncio.Redis]
MakeStore = Callable[[], Store]


CLUSTER = pytest.param("cluster", marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One cluster for the whole run, of three nodes."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made.url()


async def _clients(request: pytest.FixtureRequest) -> AsyncIterator[MakeClient]:
    fake = fakeredis.FakeServer()
    clients: list[Any] = []

    def make() -> Any:
        if request.param == "fakeredis":
            clients.append(fakeredis.FakeAsyncRedis(server=fake))
        elif request.param == "cluster":
            clients.append(connect(request.getfixturevalue("cluster_url")))
        else:
            clients.append(connect(request.getfixturevalue("valkey").url))
        return clients[-1]

    yield make
    for client in clients:
        await client.aclose()


@pytest.fixture(params=["fakeredis", "valkey", CLUSTER])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of each server."""
    async for make in _clients(request):
        yield make()


@pytest.fixture(params=["memory", "fakeredis", "valkey", CLUSTER])
async def make_store(request: pytest.FixtureRequest) -> AsyncIterator[MakeStore]:
    """Makes stores that share their streams, as processes do; on Redis each has connections of its own."""
    if request.param == "memory":
        memory = MemoryStore()
        yield lambda: memory
    else:
        async for make in _clients(request):
            yield lambda make=make: RedisStore(make())  # type: ignore[misc]


@pytest.fixture
def store(make_store: MakeStore) -> Store:
    """A store of each kind."""
    return make_store()
