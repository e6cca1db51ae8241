"""One job: who waits, until when, and what they hear."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest
import redis.asyncio

from tests.assembler.support import SID, Api, job
from tokentape_assembler.executor import ChildDied
from tokentape_assembler.job import JobRunner
from tokentape_assembler.worker import RELEASE
from tokentape_contracts import keys, limits
from tokentape_contracts.jobs import AssembleJob, JobResult

ASKED = job("1-0")
FIRST: dict[str, Any] = {"job_id": ASKED.job_id, "job_try": 1, RELEASE: lambda _: None}
STORED = {"session": SID, "request": ASKED.request, "outcome": "stored", "code": "", "detail": ""}


class Stub:
    """Executors that do what a test says, and count."""

    def __init__(self, does: Callable[[], bytes] | None = None, takes_s: float = 0.0) -> None:
        self._does = does
        self._takes_s = takes_s
        self.messages: list[bytes] = []
        self.cancelled = False

    async def run(self, message: bytes, timeout_s: float) -> bytes:
        self.messages.append(message)
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if self._does is not None:
            return self._does()
        return orjson.dumps({"outcome": "stored", "code": "", "detail": "", "timing_ms": {"fold": 1.0}})


async def _wait(client: redis.asyncio.Redis, api_id: str, deadline_s: float) -> Api:
    await client.zadd(keys.waiters(SID, ASKED.request), {api_id: time.time() + deadline_s}, gt=True)
    return Api(client, api_id)


async def test_every_waiter_hears(fake: redis.asyncio.Redis) -> None:
    """Each API process that waits gets one announcement, on a stream that expires."""
    waiting = [await _wait(fake, f"api-{i}", 60) for i in range(2)]
    stub = Stub()
    await JobRunner(fake, fake, stub).run(FIRST, ASKED.to_json())
    assert [await api.heard() for api in waiting] == [STORED, STORED]
    assert [AssembleJob.from_json(orjson.loads(message)) for message in stub.messages] == [ASKED]
    assert 0 < await fake.ttl(keys.replies("api-0")) <= 3600


async def test_the_child_says_who_waited_when_it_stored_the_result(fake: redis.asyncio.Redis) -> None:
    """Who registered later has found the result: nobody else needs to hear of it."""
    await _wait(fake, "api-1", 60)
    answer = {"outcome": "stored", "code": "", "detail": "", "timing_ms": {}, "waiters": ["api-1", "api-2"]}
    run = asyncio.create_task(
        JobRunner(fake, fake, Stub(lambda: orjson.dumps(answer), takes_s=0.1)).run(FIRST, ASKED.to_json())
    )
    await asyncio.sleep(0.05)
    await _wait(fake, "api-3", 60)
    await run
    for api_id in answer["waiters"]:
        assert await Api(fake, api_id).heard() == STORED
    assert not await fake.exists(keys.replies("api-3"))


@pytest.mark.parametrize("deadline_s", [None, -0.1])
async def test_nobody_waits(fake: redis.asyncio.Redis, deadline_s: float | None) -> None:
    """A job for which nobody waits, or nobody any more, is dropped without work and without a word."""
    if deadline_s is not None:
        await _wait(fake, "api-1", deadline_s)
    stub = Stub()
    await JobRunner(fake, fake, stub).run(FIRST, ASKED.to_json())
    assert stub.messages == []
    assert not await fake.exists(keys.replies("api-1"))


async def test_a_deadline_that_passes(fake: redis.asyncio.Redis) -> None:
    """The assembly ends at the deadline and nothing is announced: the API has answered by then."""
    await _wait(fake, "api-1", 0.1)
    stub = Stub(takes_s=30)
    await JobRunner(fake, fake, stub).run(FIRST, ASKED.to_json())
    assert stub.cancelled
    assert not await fake.exists(keys.replies("api-1"))


async def test_a_later_deadline_joins(fake: redis.asyncio.Redis) -> None:
    """A request that joins a running job with a later deadline gets its outcome; the work is done once."""
    await _wait(fake, "api-1", 0.1)
    stub = Stub(takes_s=0.3)
    run = asyncio.create_task(JobRunner(fake, fake, stub).run(FIRST, ASKED.to_json()))
    await asyncio.sleep(0.05)
    late = await _wait(fake, "api-2", 60)
    await run
    assert await late.heard() == STORED
    assert len(stub.messages) == 1
    assert not await fake.exists(keys.replies("api-1"))


async def test_a_waiter_that_gives_up(fake: redis.asyncio.Redis) -> None:
    """The worker is free about a second after the last client has gone, long before the deadline."""
    await _wait(fake, "api-1", 60)
    stub = Stub(takes_s=30)
    run = asyncio.create_task(JobRunner(fake, fake, stub).run(FIRST, ASKED.to_json()))
    await asyncio.sleep(0.05)
    await fake.zrem(keys.waiters(SID, ASKED.request), "api-1")
    async with asyncio.timeout(limits.WAIT_SLICE_S + 1):
        await run
    assert stub.cancelled


async def test_a_stored_result_is_only_announced(fake: redis.asyncio.Redis) -> None:
    """A job that a worker finished but could not announce is not assembled a second time."""
    fields = {name: bytes(value) for name, value in JobResult(b"payload", "digest", {}).to_hash()}
    await fake.hset(keys.samples(SID, ASKED.request), mapping=fields)  # type: ignore[misc]
    api = await _wait(fake, "api-1", 60)
    stub = Stub()
    await JobRunner(fake, fake, stub).run({**FIRST, "job_try": limits.JOB_TRIES + 1}, ASKED.to_json())
    assert (await api.heard())["outcome"] == "stored"
    assert stub.messages == []


async def test_a_child_that_dies(fake: redis.asyncio.Redis) -> None:
    """A child that dies is announced as a failure with the reason, and nothing is stored."""

    def die() -> bytes:
        raise ChildDied("the child process was killed by SIGKILL")

    api = await _wait(fake, "api-1", 60)
    await JobRunner(fake, fake, Stub(die)).run(FIRST, ASKED.to_json())
    heard = await api.heard()
    assert (heard["outcome"], heard["code"]) == ("failed", "assembly_failed")
    assert heard["detail"] == "the child process was killed by SIGKILL"
    assert await api.result(ASKED) is None


async def test_a_child_that_dies_when_all_is_done(fake: redis.asyncio.Redis) -> None:
    """A result that was stored before its child died is one: the waiters are told so."""

    def store_and_die() -> bytes:
        raise ChildDied("the child process was killed by SIGKILL")

    class Late(Stub):
        async def run(self, message: bytes, timeout_s: float) -> bytes:
            await fake.hset(keys.samples(SID, ASKED.request), mapping=fields)  # type: ignore[misc]
            return await super().run(message, timeout_s)

    fields = {name: bytes(value) for name, value in JobResult(b"payload", "digest", {}).to_hash()}
    api = await _wait(fake, "api-1", 60)
    await JobRunner(fake, fake, Late(store_and_die)).run(FIRST, ASKED.to_json())
    heard = await api.heard()
    assert (heard["outcome"], heard["code"]) == ("stored", "")
    result = await api.result(ASKED)
    assert result is not None
    assert result.payload == b"payload"


async def test_a_job_that_kills_its_workers(fake: redis.asyncio.Redis) -> None:
    """A job that took `limits.JOB_TRIES` workers with it is not tried again, and the waiters hear why."""
    api = await _wait(fake, "api-1", 60)
    stub = Stub()
    await JobRunner(fake, fake, stub).run({**FIRST, "job_try": limits.JOB_TRIES + 1}, ASKED.to_json())
    assert stub.messages == []
    assert await api.heard() == {
        "session": SID,
        "request": ASKED.request,
        "outcome": "failed",
        "code": "assembly_failed",
        "detail": f"{limits.JOB_TRIES} workers ended while they ran this job",
    }
