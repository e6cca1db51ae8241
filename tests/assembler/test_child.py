"""What a child does with a job, without the process around it."""

import time
from dataclasses import replace

import orjson
import pytest
import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import ResponseError

from tests.assembler.support import SID, Api, job, record, turn
from tokentape_assembler.child import Child
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import PrefixBroken, StoreUnavailable
from tokentape_contracts.jobs import AssembleJob
from tokentape_core.domain.state import turn_id


def _text(ids: object) -> str:
    return "text"


def _line(asked: AssembleJob) -> bytes:
    return orjson.dumps(asked.to_json())


async def test_a_result_is_stored_for_a_while(fake: redis.asyncio.Redis) -> None:
    """The result is in Redis, with its time to live, before the answer says so."""
    api = Api(fake)
    asked = job(await record(api.store, turns=2))
    answer = await Child(fake, _text).answer(_line(asked))
    assert (answer["outcome"], answer["code"]) == ("stored", "")
    result = await api.result(asked)
    assert result is not None
    assert result.timing_ms == answer["timing_ms"]
    assert 0 < await fake.ttl(keys.samples(asked.session_id, asked.request)) <= limits.RESULT_TTL_S


async def test_says_who_waits_as_the_result_is_stored(fake: redis.asyncio.Redis) -> None:
    """Those whose deadline has not passed; so that the worker need not ask."""
    asked = job(await record(Api(fake).store, turns=1))
    waiters = keys.waiters(asked.session_id, asked.request)
    await fake.zadd(waiters, {"late": time.time() - 1, "api-1": time.time() + 60, "api-2": time.time() + 60})
    assert (await Child(fake, _text).answer(_line(asked)))["waiters"] == ["api-1", "api-2"]


async def test_equal_requests_give_equal_bytes(fake: redis.asyncio.Redis) -> None:
    """A job that is run twice stores the same payload and the same digest."""
    api = Api(fake)
    asked = job(await record(api.store, turns=2))
    results = []
    for _ in range(2):
        await Child(fake, _text).answer(_line(asked))
        results.append(await api.result(asked))
    assert results[0] is not None
    assert results[1] is not None
    assert results[0].payload == results[1].payload
    assert results[0].digest == results[1].digest


async def test_a_refusal_is_stored(fake: redis.asyncio.Redis) -> None:
    """A broken prefix is a result like samples: it is stored with its reason."""
    api = Api(fake)
    await record(api.store, turns=1)
    await api.store.append(SID, 2, turn(2, 4, [1, 2, 3], [4]))
    asked = job(turn_id(2))
    answer = await Child(fake, _text).answer(_line(asked))
    assert (answer["outcome"], answer["code"]) == ("stored", "prefix_broken")
    result = await api.result(asked)
    assert result is not None
    assert isinstance(result.error, PrefixBroken)


async def test_what_a_newer_worker_can_read_is_not_kept(fake: redis.asyncio.Redis) -> None:
    """`event_unsupported` stays for those who wait now, not for later requests, and is no delivery."""
    asked = job(await record(Api(fake).store, turns=1))
    await fake.xadd(keys.events(SID), {"type": "turn.recorded", "v": "99"}, id="2-0")
    asked = replace(asked, tail=turn_id(2))
    answer = await Child(fake, _text).answer(_line(asked))
    assert (answer["outcome"], answer["code"]) == ("stored", "event_unsupported")
    assert limits.WAIT_SLICE_S <= await fake.ttl(keys.samples(SID, asked.request)) <= 3
    assert not await fake.exists(keys.audit(SID))


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [
        (MemoryError(), "assembly_failed", "the child process had too little memory"),
        (KeyError("x"), "internal_error", "a defect of Tokentape in a worker: KeyError: 'x'"),
        (StoreUnavailable("away"), "store_unavailable", "away"),
    ],
)
async def test_what_is_no_outcome(
    fake: redis.asyncio.Redis,
    capfd: pytest.CaptureFixture[str],
    error: Exception,
    code: str,
    detail: str,
) -> None:
    """Any other exception is a failure that says whose fault it is; nothing is stored, the next job comes."""

    def fail(ids: object) -> str:
        raise error

    api = Api(fake)
    asked = job(await record(api.store, turns=1))
    answer = await Child(fake, fail).answer(_line(asked))
    assert (answer["outcome"], answer["code"], answer["detail"]) == ("failed", code, detail)
    assert await api.result(asked) is None
    assert type(error).__name__ in capfd.readouterr().err


async def test_a_redis_that_takes_no_result(
    fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused write is the operator's to mend, no defect; and it leaves nothing."""

    async def refuse(*_: object) -> None:
        raise ResponseError("MISCONF Redis cannot persist")

    api = Api(fake)
    asked = job(await record(api.store, turns=1))
    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "execute", refuse)
        answer = await Child(fake, _text).answer(_line(asked))
    assert (answer["outcome"], answer["code"]) == ("failed", "store_unavailable")
    assert answer["detail"] == "Redis refuses the command: MISCONF Redis cannot persist"
    assert await api.result(asked) is None


async def test_an_answer_stays_short(fake: redis.asyncio.Redis, capfd: pytest.CaptureFixture[str]) -> None:
    """However long an error is, the answer fits a pipe's buffer: the child never blocks on its parent."""

    def fail(ids: object) -> str:
        raise KeyError("x" * 1_000_000)

    asked = job(await record(Api(fake).store, turns=1))
    answer = await Child(fake, fail).answer(_line(asked))
    assert len(orjson.dumps(answer)) < 10_000
