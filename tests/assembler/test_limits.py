"""Bounds of a worker: what is allowed at each, and what one more gives."""

import asyncio
import sys
import time

import orjson
import pytest
import redis.asyncio
from arq.constants import in_progress_key_prefix

from tests.assembler.support import Api, job, record, until
from tests.assembler.test_executor import COMMAND
from tests.assembler.test_job import ASKED, FIRST, Stub, _wait
from tests.assembler.test_worker import Jobs, Start, working  # noqa: F401
from tokentape_assembler.archive import Archiver
from tokentape_assembler.child import Child
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.executor import ChildDied, ExecutorPool
from tokentape_assembler.job import JobRunner
from tokentape_assembler.telemetry import Telemetry
from tokentape_contracts import keys, limits


def _text(ids: object) -> str:
    return "text"


@pytest.mark.parametrize(("takes_s", "outcome"), [(0.0, "stored"), (60.0, "failed")])
async def test_one_assembly(
    fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, takes_s: float, outcome: str
) -> None:
    """An assembly within its time is stored; a longer one ends its child and is announced as failed."""
    monkeypatch.setattr(limits, "ASSEMBLY_TIMEOUT_S", 0.3)
    program = (
        "import json, sys, time\nsys.stdin.readline()\nprint(json.dumps({'ready': True}), flush=True)\n"
        f"for line in sys.stdin: time.sleep({takes_s}); "
        "print(json.dumps({'outcome': 'stored', 'code': '', 'detail': '', 'timing_ms': {}}), flush=True)"
    )
    pool = ExecutorPool(1, [sys.executable, "-c", program], b"hello")
    await pool.start()
    api = await _wait(fake, "api-1", 60)
    began = time.monotonic()
    await JobRunner(fake, fake, pool).run(FIRST, ASKED.to_json())
    assert (await api.heard())["outcome"] == outcome
    assert time.monotonic() - began < 5
    await pool.close()


@pytest.mark.parametrize(
    ("job_try", "outcome"), [(limits.JOB_TRIES, "stored"), (limits.JOB_TRIES + 1, "failed")]
)
async def test_tries(fake: redis.asyncio.Redis, job_try: int, outcome: str) -> None:
    """A job is run once more at its last try, and not beyond."""
    api = await _wait(fake, "api-1", 60)
    await JobRunner(fake, fake, Stub()).run({**FIRST, "job_try": job_try}, ASKED.to_json())
    assert (await api.heard())["outcome"] == outcome


async def test_announcements_are_bounded(fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply stream that nobody reads keeps as many announcements as the limit, and for so long."""
    monkeypatch.setattr(limits, "REPLY_STREAM_LENGTH", 100)
    key = keys.replies("api-1")
    await _wait(fake, "api-1", 60)
    for _ in range(300):
        await fake.xadd(key, {"old": "one"})
    await JobRunner(fake, fake, Stub()).run(FIRST, ASKED.to_json())
    assert 100 <= await fake.xlen(key) <= 200  # Redis drops whole nodes of its own
    assert limits.REPLY_STREAM_S - 5 < await fake.ttl(key) <= limits.REPLY_STREAM_S


async def test_a_few_announcements_are_all_kept(fake: redis.asyncio.Redis) -> None:
    """Below the limit none is dropped."""
    key = keys.replies("api-1")
    await _wait(fake, "api-1", 60)
    for _ in range(50):
        await fake.xadd(key, {"old": "one"})
    await JobRunner(fake, fake, Stub()).run(FIRST, ASKED.to_json())
    assert await fake.xlen(key) == 51


@pytest.mark.parametrize(("reads", "begins"), [(3, True), (2, False)])
async def test_entries_of_the_queue(
    working: Start,  # noqa: F811
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    reads: int,
    begins: bool,
) -> None:
    """A free job behind running ones is found if the worker looks that far, and not one entry further."""
    monkeypatch.setattr(limits, "QUEUE_READ", reads)
    for running in ("a", "b"):
        await api.ask(job("1-0", sid=running))
        await api.client.set(in_progress_key_prefix + job("1-0", sid=running).job_id, b"1")
        await asyncio.sleep(0.005)
    await api.ask(job("1-0", sid="free"))
    done = Jobs()
    async with working(done):
        await asyncio.sleep(0.8)
    assert bool(done.began) is begins


@pytest.mark.parametrize("within", [True, False])
async def test_the_start_of_a_child(monkeypatch: pytest.MonkeyPatch, within: bool) -> None:
    """A child that is ready within the time serves; a slower one is killed, and the worker cannot start."""
    monkeypatch.setattr(limits, "CHILD_START_S", 20.0 if within else 0.2)
    command = COMMAND if within else [sys.executable, "-c", "import time; time.sleep(60)"]
    pool = ExecutorPool(1, command, b"hello")
    if within:
        await pool.start()
        assert pool.ready == 1
    else:
        with pytest.raises(ChildDied, match=r"not ready within 0\.2 s"):
            await pool.start()
    await pool.close()


async def test_a_result_expires(fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result is there for a repeated request, and gone after its time."""
    monkeypatch.setattr(limits, "RESULT_TTL_S", 1)
    api = Api(fake)
    asked = job(await record(api.store, turns=1))
    await Child(fake, _text).answer(orjson.dumps(asked.to_json()))
    assert await api.result(asked) is not None
    await asyncio.sleep(1.1)
    assert await api.result(asked) is None


async def test_the_audit_keeps_its_entries(fake: redis.asyncio.Redis) -> None:
    """Up to the limit no entry is dropped."""
    asked = job(await record(Api(fake).store, turns=1))
    for _ in range(limits.AUDIT_ENTRIES - 1):
        await fake.xadd(keys.audit(asked.session_id), {"old": "entry"})
    await Child(fake, _text).answer(orjson.dumps(asked.to_json()))
    assert await fake.xlen(keys.audit(asked.session_id)) == limits.AUDIT_ENTRIES


async def test_the_archiver_comes_round(fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again after each interval, and not within one."""
    monkeypatch.setattr(limits, "ARCHIVE_EVERY_S", 0.3)
    looks: list[float] = []

    async def look() -> int:
        looks.append(time.monotonic())
        return 0

    unused: object = None
    archiver = Archiver(fake, unused)  # type: ignore[arg-type]
    monkeypatch.setattr(archiver, "round", look)
    began = time.monotonic()
    task = asyncio.create_task(archiver.run())
    await until(lambda: len(looks) == 2)
    task.cancel()
    assert looks[0] - began >= 0.29
    assert looks[1] - looks[0] >= 0.29


@pytest.mark.parametrize(("more", "pause_s", "answered"), [(0, 0.1, True), (1, 0.1, False), (0, 5.0, False)])
async def test_heads_of_probes(
    fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, more: int, pause_s: float, answered: bool
) -> None:
    """A head of the greatest length that comes in time is answered; a longer or a later one is not."""
    monkeypatch.setattr(limits, "WORKER_HEAD_S", 0.5)
    endpoint = Endpoint(Telemetry(), [fake], lambda: 1, "127.0.0.1", 0)
    async with endpoint:
        reader, writer = await asyncio.open_connection("127.0.0.1", endpoint.port)
        start = b"GET /health HTTP/1.1\r\nX: "
        writer.write(start)
        waiting = asyncio.create_task(reader.read())
        await asyncio.wait({waiting}, timeout=pause_s)
        writer.write(b"x" * (limits.WORKER_HEAD_BYTES - len(start) + more) + b"\r\n\r\n")
        assert (await asyncio.wait_for(waiting, 5)).startswith(b"HTTP/1.1 200") == answered
        writer.close()
