"""Waiting for the workers when announcements and results go astray."""

import asyncio
import time
from collections.abc import AsyncIterator

import fakeredis
import pytest
import redis.asyncio
from arq.constants import in_progress_key_prefix, job_key_prefix

from tokentape_api.collect import Collector
from tokentape_contracts import jobs, keys, limits
from tokentape_contracts.errors import (
    AssemblyFailed,
    DeadlineExceeded,
    InternalError,
    QueueFull,
    ReplayBroken,
    StoreUnavailable,
    TokentapeError,
)
from tokentape_contracts.jobs import AssembleJob, JobResult, StoredResult
from tokentape_core.store import connect

JOB = AssembleJob("sid", "1-0", "digest", 1, None, None)
JOB_KEY = job_key_prefix + JOB.job_id
RESULT = JobResult(b"payload", "hex", {"fold": 1.0})


@pytest.fixture
def server() -> fakeredis.FakeServer:
    return fakeredis.FakeServer()


def client(server: fakeredis.FakeServer) -> redis.asyncio.Redis:
    return fakeredis.FakeAsyncRedis(server=server)


@pytest.fixture
async def worker(server: fakeredis.FakeServer) -> AsyncIterator[redis.asyncio.Redis]:
    """A client with which a test plays the worker."""
    redis = client(server)
    yield redis
    await redis.aclose()


@pytest.fixture
async def collector(server: fakeredis.FakeServer) -> AsyncIterator[Collector]:
    queue = client(server)
    collector = Collector(queue, client(server), queue)
    await collector.start()
    yield collector
    await collector.close()


async def store(worker: redis.asyncio.Redis, result: JobResult = RESULT) -> None:
    await worker.hset(keys.samples("sid", "digest"), mapping={name: bytes(v) for name, v in result.to_hash()})


async def announce(worker: redis.asyncio.Redis, outcome: str, detail: str = "", **code: str) -> None:
    for api_id, _ in await worker.zrange(keys.waiters("sid", "digest"), 0, -1, withscores=True):
        fields = {"session": "sid", "request": "digest", "outcome": outcome, "detail": detail, **code}
        await worker.xadd(keys.replies(api_id.decode()), fields)


async def until_queued(worker: redis.asyncio.Redis, jobs: int = 1) -> None:
    async with asyncio.timeout(5):
        while await worker.zcard(keys.QUEUE) < jobs:
            await asyncio.sleep(0.005)


async def test_announced_result(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A stored and announced result is returned; the queue holds one job and one wake token."""
    waiting = asyncio.create_task(collector.collect(JOB, 5))
    await until_queued(worker)
    await asyncio.sleep(0.05)
    assert (await worker.zcard(keys.QUEUE), await worker.llen(keys.WAKE)) == (1, 1)
    await store(worker)
    await announce(worker, "stored")
    assert (await waiting).first == b"payload"


async def test_stored_result_needs_no_worker(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A repeated request finds the stored bytes and enqueues nothing."""
    await store(worker)
    assert (await collector.collect(JOB, 5)).digest == "hex"
    assert await worker.zcard(keys.QUEUE) == 0


async def test_lost_announcement(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A result whose announcement was lost is found within about a second."""
    waiting = asyncio.create_task(collector.collect(JOB, 10))
    await until_queued(worker)
    await store(worker)
    async with asyncio.timeout(limits.WAIT_SLICE_S + 2):
        assert (await waiting).first == b"payload"


GARBAGE: dict[str, dict[bytes, bytes]] = {
    "nothing of ours": {b"x": b"y"},
    "no request": {b"session": b"sid", b"outcome": b"stored"},
    "no outcome": {b"session": b"sid", b"request": b"digest"},
    "no detail": {b"session": b"sid", b"request": b"digest", b"outcome": b"failed"},
    "not UTF-8": {b"session": b"\xff\xfe", b"request": b"digest", b"outcome": b"stored"},
    "a code that is not UTF-8": {
        b"session": b"sid",
        b"request": b"digest",
        b"outcome": b"failed",
        b"detail": b"d",
        b"code": b"\xff",
    },
    "empty names": {b"": b""},
}


async def test_announcements_that_are_none(
    collector: Collector, worker: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are counted and passed over; the ones after them are heard at once, and the reader lives."""
    monkeypatch.setattr(limits, "WAIT_SLICE_S", 30.0)
    refused: list[str] = []
    collector._refused = refused.append
    waiting = asyncio.create_task(collector.collect(JOB, 20))
    await until_queued(worker)
    await asyncio.sleep(0.05)
    [(api_id, _)] = await worker.zrange(keys.waiters("sid", "digest"), 0, -1, withscores=True)
    for fields in GARBAGE.values():
        await worker.xadd(keys.replies(api_id.decode()), dict(fields))
    await store(worker)
    await announce(worker, "stored")
    assert (await asyncio.wait_for(waiting, 5)).first == b"payload"
    assert refused == ["announcement"] * len(GARBAGE)
    assert collector.is_reading()


@pytest.mark.parametrize(
    "head",
    [b"", b"\xff", b"[]", b"{}", b"null", b'{"size":1,"parts":1,"digest":"","timing_ms":{},"error":[1]}'],
)
async def test_a_result_that_is_none(collector: Collector, worker: redis.asyncio.Redis, head: bytes) -> None:
    """It goes, and a worker is asked for another one."""
    refused: list[str] = []
    collector._refused = refused.append
    await worker.hset(keys.samples("sid", "digest"), mapping={jobs.HEAD: head, jobs.FIRST_PART: b"x"})
    waiting = asyncio.create_task(collector.collect(JOB, 5))
    await until_queued(worker)
    assert not await worker.exists(keys.samples("sid", "digest"))
    await asyncio.sleep(0.05)
    await store(worker)
    await announce(worker, "stored")
    assert (await waiting).first == b"payload"
    assert refused == ["result"]


async def test_lost_job(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A job that Redis lost is enqueued again."""
    waiting = asyncio.create_task(collector.collect(JOB, 10))
    await until_queued(worker)
    await worker.flushall()
    await until_queued(worker)
    waiting.cancel()


async def test_what_is_left_of_a_job_is_no_hindrance(
    collector: Collector, worker: redis.asyncio.Redis
) -> None:
    """Of a job's two keys one may be gone: a collect puts it there again."""
    for gone in (keys.QUEUE, JOB_KEY):
        waiting = asyncio.create_task(collector.collect(JOB, 5))
        await until_queued(worker)
        waiting.cancel()
        await asyncio.wait({waiting})
        await worker.delete(gone)
        waiting = asyncio.create_task(collector.collect(JOB, 5))
        async with asyncio.timeout(5):
            while not (await worker.zcard(keys.QUEUE) and await worker.exists(JOB_KEY)):
                await asyncio.sleep(0.005)
        waiting.cancel()
        await asyncio.wait({waiting})
        await worker.flushall()


async def test_a_job_stays_for_whoever_waits_longest(
    collector: Collector, worker: redis.asyncio.Redis
) -> None:
    """A request that joins a job with a later deadline keeps it for longer, and none for shorter."""
    waiting = [asyncio.create_task(collector.collect(JOB, 5))]
    await until_queued(worker)
    for deadline_s, kept_s in ((300, 360), (5, 360)):
        waiting.append(asyncio.create_task(collector.collect(JOB, deadline_s)))
        await asyncio.sleep(0.1)
        assert kept_s - 5 < await worker.ttl(JOB_KEY) <= kept_s
    for collect in waiting:
        collect.cancel()
    await asyncio.wait(waiting)


async def test_announced_but_gone(
    collector: Collector, worker: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An announced result that is gone costs a few looks, not a tight loop, and then the deadline."""
    looks = 0
    look = collector._look

    async def counting(job: AssembleJob, deadline: float) -> StoredResult | None:
        nonlocal looks
        looks += 1
        return await look(job, deadline)

    monkeypatch.setattr(collector, "_look", counting)
    waiting = asyncio.create_task(collector.collect(JOB, 1.5))
    await until_queued(worker)
    await announce(worker, "stored")
    with pytest.raises(DeadlineExceeded):
        await waiting
    assert looks <= 5


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ({"code": "assembly_failed"}, AssemblyFailed),
        ({"code": "store_unavailable"}, StoreUnavailable),
        ({"code": "internal_error"}, InternalError),
        ({"code": "of a newer version"}, AssemblyFailed),
        ({}, AssemblyFailed),
    ],
)
async def test_failed_job(
    collector: Collector, worker: redis.asyncio.Redis, code: dict[str, str], error: type[TokentapeError]
) -> None:
    """A failure comes with its code and its reason; a worker of an earlier version names no code."""
    waiting = asyncio.create_task(collector.collect(JOB, 5))
    await until_queued(worker)
    await announce(worker, "failed", "was killed by SIGKILL", **code)
    with pytest.raises(error, match="SIGKILL"):
        await waiting


async def test_queue_full(
    collector: Collector, worker: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the bound a collect is refused at once; one whose job is in the queue already is not."""
    monkeypatch.setattr(limits, "QUEUE_DEPTH", 2)
    await worker.zadd(keys.QUEUE, {"a": 1, "b": 2})
    with pytest.raises(QueueFull, match="2 collects"):
        await collector.collect(JOB, 5)
    await worker.zadd(keys.QUEUE, {JOB.job_id: 3})
    await worker.set(JOB_KEY, b"a job")
    with pytest.raises(DeadlineExceeded):
        await collector.collect(JOB, 0.1)


PART_BYTES = 4


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STORE_VALUE_BYTES", PART_BYTES)


@pytest.mark.parametrize("size", [1, 3, 4, 5, 8, 9, 50])
async def test_all_parts_in_order(
    collector: Collector, worker: redis.asyncio.Redis, small_parts: None, size: int
) -> None:
    """A payload that was cut comes whole: every part once, in order, none longer than its bound."""
    payload = bytes(range(size))
    await store(worker, JobResult(payload, "hex", {}))
    result = await collector.collect(JOB, 5)
    assert (result.size, result.first) == (size, payload[:PART_BYTES])
    parts = [part async for part in collector.payload(JOB, result)]
    assert parts == [payload[start : start + PART_BYTES] for start in range(0, size, PART_BYTES)]


async def test_an_error_has_no_payload(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A refusal comes with its reason, and with nothing to send."""
    await store(worker, JobResult(b"", "", {}, ReplayBroken("turn 2: rows 3 to 5 are missing")))
    result = await collector.collect(JOB, 5)
    assert isinstance(result.error, ReplayBroken)
    assert (result.error.detail, result.parts) == ("turn 2: rows 3 to 5 are missing", 0)
    assert b"".join([part async for part in collector.payload(JOB, result)]) == b""


async def test_a_part_is_read_when_it_is_wanted(
    collector: Collector, worker: redis.asyncio.Redis, small_parts: None
) -> None:
    """The first part came with the result and is not read again; the others are read one at a time."""
    await store(worker, JobResult(b"0123456789", "hex", {}))
    result = await collector.collect(JOB, 5)
    key = keys.samples("sid", "digest")
    await worker.hdel(key, jobs.FIRST_PART)
    await worker.hset(key, "1", b"four")
    parts = collector.payload(JOB, result)
    assert [await anext(parts), await anext(parts)] == [b"0123", b"four"]
    await worker.hset(key, "2", b"xx")
    assert [part async for part in parts] == [b"xx"]


@pytest.mark.parametrize("sent", [1, 2])
async def test_a_result_that_expires_on_the_way(
    collector: Collector, worker: redis.asyncio.Redis, small_parts: None, sent: int
) -> None:
    """A part that is gone is an error that names it, never a shorter payload."""
    await store(worker, JobResult(b"0123456789", "hex", {}))
    parts = collector.payload(JOB, await collector.collect(JOB, 5))
    for _ in range(sent):
        await anext(parts)
    await worker.delete(keys.samples("sid", "digest"))
    with pytest.raises(StoreUnavailable, match=f"part {sent} of the result has expired"):
        await anext(parts)


async def test_one_part_that_is_gone(
    collector: Collector, worker: redis.asyncio.Redis, small_parts: None
) -> None:
    """A hole in the middle is an error too, though later parts are there."""
    await store(worker, JobResult(b"0123456789", "hex", {}))
    parts = collector.payload(JOB, await collector.collect(JOB, 5))
    await worker.hdel(keys.samples("sid", "digest"), "1")
    with pytest.raises(StoreUnavailable, match="part 1"):
        [part async for part in parts]


async def test_a_server_that_goes_away_on_the_way(
    server: fakeredis.FakeServer, collector: Collector, worker: redis.asyncio.Redis, small_parts: None
) -> None:
    """A lost server is `store_unavailable` between two parts as anywhere else."""
    await store(worker, JobResult(b"0123456789", "hex", {}))
    parts = collector.payload(JOB, await collector.collect(JOB, 5))
    await anext(parts)
    server.connected = False
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await anext(parts)
    server.connected = True


async def test_a_deadline_says_at_which_stage(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """Past the deadline the error says whether a worker had the job, so that one knows where to look."""
    with pytest.raises(DeadlineExceeded, match="no worker had taken the job, one of 1"):
        await collector.collect(JOB, 0.2)
    await worker.set(f"arq:in-progress:{JOB.job_id}", b"1")
    with pytest.raises(DeadlineExceeded, match="still assembling"):
        await collector.collect(JOB, 0.2)


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_job_that_nobody_waits_for_leaves_the_queue(
    collector: Collector, worker: redis.asyncio.Redis, is_cancelled: bool
) -> None:
    """Else those who gave up would fill the queue. A job that runs, or that others wait for, stays."""

    async def ask_and_leave() -> None:
        waiting = asyncio.create_task(collector.collect(JOB, 5 if is_cancelled else 0.1))
        await until_queued(worker)
        if is_cancelled:
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    await ask_and_leave()
    assert (await worker.zcard(keys.QUEUE), await worker.exists(JOB_KEY)) == (0, 0)
    waiters = keys.waiters(JOB.session_id, JOB.request)
    await worker.zadd(waiters, {"another process": time.time() + 60})
    await ask_and_leave()
    assert (await worker.zcard(keys.QUEUE), await worker.exists(JOB_KEY)) == (1, 1)
    await worker.delete(waiters)
    await worker.set(in_progress_key_prefix + JOB.job_id, b"1")
    await ask_and_leave()
    assert (await worker.zcard(keys.QUEUE), await worker.exists(JOB_KEY)) == (1, 1)


async def test_a_job_that_left_comes_again(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """Who begins to wait just when another one leaves looks again, and enqueues what is gone."""
    waiting = asyncio.create_task(collector.collect(JOB, 10))
    await until_queued(worker)
    await worker.delete(keys.QUEUE, JOB_KEY)
    await until_queued(worker)
    assert await worker.exists(JOB_KEY)
    waiting.cancel()
    await asyncio.wait({waiting})


async def test_the_deadline_holds_while_redis_is_silent() -> None:
    """A collect ends in its time, and says what used it up, although commands are tried for longer."""

    ended = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    clients = [connect(f"redis://127.0.0.1:{port}") for _ in range(3)]
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s: Redis does not answer"):
        await Collector(*clients).collect(JOB, 0.5)
    assert time.monotonic() - began < 0.5 + 1.0
    for client in clients:
        await client.aclose()
    ended.set()
    server.close()
    await server.wait_closed()


async def test_a_client_that_is_gone_waits_no_more(collector: Collector, worker: redis.asyncio.Redis) -> None:
    """A cancelled request is no waiter any more, unless an equal one of this process still waits."""
    waiters = keys.waiters(JOB.session_id, JOB.request)
    first, second = (asyncio.create_task(collector.collect(JOB, 10)) for _ in range(2))
    await until_queued(worker)
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.wait({first})
    assert await worker.zcard(waiters) == 1
    second.cancel()
    await asyncio.wait({second})
    assert await worker.zcard(waiters) == 0
