"""A client whose connection, or the server behind it, is not what it was. Small, and without processes."""

import asyncio
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.support.fault_proxy import FaultProxy, Moment
from tests.support.sessions import opened, turn
from tokentape_api.collect import Collector
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_contracts.jobs import AssembleJob, JobResult
from tokentape_core.store import RedisStore, connect

AUTH = re.compile(rb"AUTH\r\n")
ENQUEUES = re.compile(rb"\r\narq:job:")
BOUND_S = 5.0


@pytest.fixture
def proxy(server: EmbeddedValkey) -> Iterator[FaultProxy]:
    with FaultProxy(server.port) as proxy:
        yield proxy


@pytest.fixture
async def direct(server: EmbeddedValkey) -> AsyncIterator[Any]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def store(server: EmbeddedValkey, proxy: FaultProxy) -> AsyncIterator[RedisStore]:
    """Behind the proxy."""
    store = RedisStore(connect(proxy.url(server.url)))
    yield store
    await store.close()


async def test_a_connection_that_breaks_off_while_it_is_set_up_is_tried_again(
    proxy: FaultProxy, store: RedisStore
) -> None:
    """As a refused one is: a server that is just ending accepts connections and answers nothing."""
    rules = [proxy.strike(AUTH, "before") for _ in range(3)]
    await store.ready()
    assert all(rule.struck.is_set() for rule in rules)


async def test_a_server_that_never_takes_the_password_is_unavailable_in_time(
    proxy: FaultProxy, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tries end at the deadline of every other command."""
    monkeypatch.setattr(limits, "STORE_RETRY_S", 0.4)
    for _ in range(1_000):
        proxy.strike(AUTH, "before")
    async with asyncio.timeout(BOUND_S):
        with pytest.raises(StoreUnavailable, match="cannot be reached"):
            await store.ready()


async def test_a_demoted_server_is_left(
    server: EmbeddedValkey, proxy: FaultProxy, store: RedisStore, session_id: str, tmp_path: Path
) -> None:
    """One write is refused by the server that is a replica now; the next goes to the new one.

    Every idle connection is given up with it: not one request for each.
    """
    with EmbeddedValkey(tmp_path / "other") as other:
        other_client = connect(other.url)
        await RedisStore(other_client).open(session_id, opened())
        await asyncio.gather(*(store.open(uuid.uuid4().hex, opened()) for _ in range(20)))
        await store.open(session_id, opened())
        admin = connect(server.url)
        await admin.execute_command("REPLICAOF", "127.0.0.1", "1")
        await admin.aclose()
        await asyncio.to_thread(_same_password, proxy, server, other)
        with pytest.raises(StoreUnavailable, match="read only"):
            await store.append(session_id, 1, turn())
        await asyncio.gather(*(store.open(uuid.uuid4().hex, opened()) for _ in range(20)))
        await store.append(session_id, 1, turn())
        assert len(await RedisStore(other_client).read(session_id)) == 2
        await other_client.aclose()


def _same_password(proxy: FaultProxy, server: EmbeddedValkey, other: EmbeddedValkey) -> None:
    """Moves the address to the other server, which takes the same password."""
    with redis.Redis.from_url(other.url) as client:
        client.config_set("requirepass", server.url.partition("//:")[2].partition("@")[0])
    proxy.target = other.port


def _job() -> AssembleJob:
    return AssembleJob(uuid.uuid4().hex, "1-0", uuid.uuid4().hex, 1, None, None)


async def _store_result(client: Any, job: AssembleJob) -> None:
    for name, value in JobResult(b"payload", "d", {}).to_hash():
        await client.hset(keys.samples(job.session_id, job.request), name, bytes(value))


@pytest.fixture
async def collector(server: EmbeddedValkey, proxy: FaultProxy) -> AsyncIterator[Collector]:
    clients = [connect(proxy.url(server.url)) for _ in range(2)]
    collector = Collector(*clients, clients[0])
    await collector.start()
    yield collector
    await collector.close()
    for client in clients:
        await client.connection_pool.disconnect()


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
async def test_a_connection_that_is_lost_while_a_job_is_enqueued_is_no_failure(
    moment: Moment, proxy: FaultProxy, collector: Collector, direct: Any
) -> None:
    """The POST is not repeated by anyone: the command is, and enqueues one job."""
    job = _job()
    rule = proxy.strike(ENQUEUES, moment)
    collecting = asyncio.create_task(collector.collect(job, 10.0))
    async with asyncio.timeout(BOUND_S):
        while not await direct.zscore(keys.QUEUE, job.job_id):
            assert not collecting.done()
            await asyncio.sleep(0.02)
    assert rule.struck.is_set()
    assert await direct.zcard(keys.QUEUE) == 1
    await _store_result(direct, job)
    assert (await collecting).first == b"payload"


async def test_announcements_are_heard_after_a_failover(collector: Collector, direct: Any) -> None:
    """A server that becomes a replica ends reads that wait, with an error of its own; the reader goes on."""
    await asyncio.sleep(0.2)  # the reader waits
    await direct.execute_command("REPLICAOF", "127.0.0.1", "1")
    await asyncio.sleep(0.1)
    await direct.execute_command("REPLICAOF", "NO", "ONE")
    job = _job()
    collecting = asyncio.create_task(collector.collect(job, 10.0))
    async with asyncio.timeout(BOUND_S):
        while not (waiting := await direct.zrange(keys.waiters(job.session_id, job.request), 0, -1)):
            await asyncio.sleep(0.01)
        await direct.xadd(
            keys.replies(waiting[0].decode()),
            {"session": job.session_id, "request": job.request, "outcome": "failed", "detail": "heard"},
        )
        with pytest.raises(Exception, match="heard"):
            await collecting
