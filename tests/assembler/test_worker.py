"""The worker's loop: waking, claims, leases, capacity, outages, draining; on a real server."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import pytest
import redis.asyncio
from arq.constants import in_progress_key_prefix, job_key_prefix

from tests.assembler.support import Api, Server, job, until
from tokentape_assembler.worker import RELEASE, AssemblyWorker, arq_client
from tokentape_contracts import jobs, keys, limits
from tokentape_contracts.jobs import FUNCTION
from tokentape_core.store import connect


class Jobs:
    """A job function that notes when jobs begin and end."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.ended: list[str] = []
        self.takes_s = 0.0
        self.releases = False
        self.refused = 0

    def refuse(self) -> None:
        self.refused += 1

    async def run(self, ctx: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self.began.append(ctx["job_id"])
        if self.releases:
            ctx[RELEASE](ctx["job_id"])
        await asyncio.sleep(self.takes_s)
        self.ended.append(ctx["job_id"])


class Start(Protocol):
    def __call__(self, done: Jobs, capacity: int = 1) -> AbstractAsyncContextManager[asyncio.Event]: ...


@pytest.fixture
def working(server: Server) -> Start:
    """Runs a worker for the length of a `with` block, which then drains."""

    @asynccontextmanager
    async def start(done: Jobs, capacity: int = 1) -> AsyncIterator[asyncio.Event]:
        client = connect(server.url)
        stop = asyncio.Event()
        worker = AssemblyWorker(arq_client(client), done.run, lambda: capacity, stop, refused=done.refuse)
        running = asyncio.create_task(worker.async_run())
        await asyncio.sleep(0.05)
        yield stop
        stop.set()
        await running
        await client.aclose()

    return start


async def _all_done(client: redis.asyncio.Redis) -> None:
    """Waits until arq holds nothing: no queue, no job, no lease, no counter."""

    async def holds_nothing() -> bool:
        return not await client.keys("arq:*")

    await until(holds_nothing)


async def test_an_idle_worker_wakes(working: Start, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job begins long before the next poll, and leaves nothing of arq's behind."""
    monkeypatch.setattr("tokentape_assembler.worker._POLL_S", 4.0)
    done = Jobs()
    async with working(done) as stop:
        for i in range(3):
            await api.ask(job("1-0", sid=f"s{i}"))
            await until(lambda i=i: len(done.ended) == i + 1, timeout_s=2)  # type: ignore[misc]
        await _all_done(api.client)
        stop.set()
        await api.client.rpush(keys.WAKE, 1)  # type: ignore[misc]


async def test_a_lost_token_delays_only(working: Start, api: Api) -> None:
    """A job whose wake-up was lost is found by the poll."""
    done = Jobs()
    async with working(done):
        # arq's own way to enqueue, which knows no tokens.
        lost = job("1-0")
        await arq_client(api.client).enqueue_job(FUNCTION, lost.to_json(), _job_id=lost.job_id)
        assert not await api.client.exists(keys.WAKE)
        await until(lambda: len(done.ended) == 1)


async def test_equal_requests_share_a_job(working: Start, api: Api) -> None:
    """The same request, asked again while its job waits or runs, is not run twice."""
    done = Jobs()
    done.takes_s = 0.2
    async with working(done, 4):
        asked = [await api.ask(job("1-0")) for _ in range(3)]
        await until(lambda: len(done.ended) == 1)
        await _all_done(api.client)
    assert asked == [True, False, False]
    assert len(done.began) == 1


async def test_two_workers_share_the_queue(working: Start, api: Api) -> None:
    """Of many workers exactly one runs a job, and a busy one leaves the rest to the others."""
    one, two = Jobs(), Jobs()
    one.takes_s = two.takes_s = 0.05
    async with working(one), working(two):
        names = [job("1-0", sid=f"s{i}") for i in range(20)]
        for asked in names:
            await api.ask(asked)
        await _all_done(api.client)
    assert sorted(one.ended + two.ended) == sorted(asked.job_id for asked in names)
    assert len(one.ended) >= 5
    assert len(two.ended) >= 5


@pytest.mark.parametrize("releases", [False, True])
async def test_a_place_that_is_released_is_taken_at_once(
    working: Start, api: Api, monkeypatch: pytest.MonkeyPatch, releases: bool
) -> None:
    """The next job begins while the one before is announced; else only when that has ended."""
    monkeypatch.setattr("tokentape_assembler.worker._POLL_S", 4.0)
    done = Jobs()
    done.takes_s, done.releases = 0.5, releases
    async with working(done) as stop:
        for i in range(3):
            await api.ask(job("1-0", sid=f"s{i}"))
        await until(lambda: len(done.began) == (3 if releases else 1))
        await asyncio.sleep(0.1)
        assert (len(done.began), done.ended) == (3 if releases else 1, [])
        await until(lambda: len(done.ended) == 3)
        stop.set()
        await api.client.rpush(keys.WAKE, 1)  # type: ignore[misc]


async def test_no_more_jobs_than_capacity(working: Start, api: Api) -> None:
    """A worker without capacity takes no job, and no wake-up from a worker that has some."""
    full, free = Jobs(), Jobs()
    async with working(full, 0):
        await api.ask(job("1-0"))
        await asyncio.sleep(0.6)
        assert await api.client.lrange(keys.WAKE, 0, -1) == [b"1"]  # type: ignore[misc]
        async with working(free):
            await until(lambda: len(free.ended) == 1)
    assert full.began == []


async def test_a_lease_is_renewed(working: Start, api: Api) -> None:
    """A job that runs longer than a lease is not taken by another worker."""
    one, two = Jobs(), Jobs()
    one.takes_s = two.takes_s = limits.LEASE_S * 1.5
    async with working(one), working(two):
        await api.ask(job("1-0"))
        await asyncio.sleep(limits.LEASE_S * 1.25)
        lease_ms = await api.client.pttl(in_progress_key_prefix + job("1-0").job_id)
        assert 0 < lease_ms <= limits.LEASE_S * 1000
        await until(lambda: len(one.ended + two.ended) == 1)
    assert len(one.began + two.began) == 1


async def test_a_claim_on_a_finished_job(working: Start, api: Api) -> None:
    """A job that ended between a worker's look at the queue and its claim is not run, nor kept claimed."""
    done = Jobs()
    worker = AssemblyWorker(arq_client(api.client), done.run, lambda: 1, asyncio.Event())
    await worker.start_jobs([b"ended"])
    assert done.began == []
    assert await api.client.keys("*") == []


async def test_a_restart_of_redis(working: Start, server: Server, api: Api) -> None:
    """A worker outlives a restart of Redis; jobs enqueued before and after it are run."""
    done = Jobs()
    done.takes_s = 0.5
    async with working(done):
        await api.ask(job("1-0", sid="before"))
        await until(lambda: len(done.began) == 1)
        server.stop()
        await asyncio.sleep(1)
        server.start()
        await api.ask(job("1-0", sid="after"))
        await until(lambda: {name.split(":")[0] for name in done.ended} == {"before", "after"})
        await _all_done(api.client)


async def test_entries_that_are_no_jobs(working: Start, api: Api) -> None:
    """They go, each counted once, and the jobs among them run, whatever score they have."""
    bodies = {
        "no time": jobs.serialize({"f": FUNCTION, "a": [1], "k": {}, "t": None, "et": "yesterday"}),
        "no JSON": b"\x80\x04",
        "no function": jobs.serialize({"f": "f", "a": [], "k": {}, "t": 1, "et": 1}),
    }
    for name, body in bodies.items():
        await api.client.set(job_key_prefix + name, body)
    names: list[Any] = [b"\xff\xfe", *bodies, "nothing", "", "x" * 10_000]
    await api.client.zadd(keys.QUEUE, {name: place for place, name in enumerate(names)})
    await api.client.zadd(keys.QUEUE, {b"\xff": float("-inf"), b"\x80": float("inf")})
    first, second = job("1-0", sid="first"), job("1-0", sid="second")
    for each, score in ((first, "inf"), (second, "-inf")):
        await api.ask(each)
        await api.client.zadd(keys.QUEUE, {each.job_id: float(score)})
    done = Jobs()
    async with working(done):
        await until(lambda: len(done.ended) == 2)
        await _all_done(api.client)
    assert sorted(done.ended) == sorted([first.job_id, second.job_id])
    assert done.refused == 4  # what has a name, and a body that says what it is or none, arq takes out itself


async def test_draining(working: Start, api: Api) -> None:
    """A worker that is told to stop finishes what runs and leaves what waits."""
    done = Jobs()
    done.takes_s = 0.5
    async with working(done) as stop:
        await api.ask(job("1-0", sid="running"))
        await until(lambda: len(done.began) == 1)
        await api.ask(job("1-0", sid="waiting"))
        stop.set()
    assert [name.split(":")[0] for name in done.ended] == ["running"]
    assert await api.client.zrange(keys.QUEUE, 0, -1) == [job("1-0", sid="waiting").job_id.encode()]
