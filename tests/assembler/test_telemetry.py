"""What a worker process tells about itself: metrics, spans and log lines, and its HTTP endpoint."""

import asyncio
import logging
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import orjson
import psutil
import pytest
import redis.asyncio
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from tests.assembler.support import SID, Api, Server, WorkerProcess, job, record, turn, until
from tests.assembler.test_job import FIRST, Stub
from tests.assembler.test_outcome import Conversation
from tokentape_assembler import telemetry
from tokentape_assembler.child import Child
from tokentape_assembler.counts import Counts
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.executor import ChildDied, Executor, ExecutorError
from tokentape_assembler.job import Executors, JobRunner
from tokentape_assembler.outcome import MISMATCHES, REFUSALS
from tokentape_assembler.telemetry import Telemetry
from tokentape_assembler.worker import AssemblyWorker, arq_client
from tokentape_contracts import keys
from tokentape_contracts.accounting import FATES
from tokentape_contracts.jobs import AssembleJob
from tokentape_contracts.samples import Status
from tokentape_core.domain.state import turn_id
from tokentape_core.text.render import ChatRenderer
from tokentape_core.tracing import OpenTelemetry


def series(found: Telemetry) -> dict[str, float]:
    """Name and labels → value of all series that are ours."""
    return series_of(found.meter.expose().decode())


def series_of(text: str) -> dict[str, float]:
    """The same of a scrape."""
    return {
        sample.name.removeprefix("tokentape_")
        + "".join(f" {v}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tokentape_") and not sample.name.endswith("_bucket")
    }


def outcomes(found: dict[str, float]) -> dict[str, float]:
    """Outcome → jobs, of such series."""
    return {outcome: found[f"job_outcomes_total {outcome}"] for outcome in telemetry.OUTCOMES}


class InProcess:
    """Runs jobs in this process, as a child process would."""

    def __init__(self, client: redis.asyncio.Redis, renderer: ChatRenderer | None = None) -> None:
        self._child = Child(client, lambda ids: "text", renderer=renderer)

    async def run(self, message: bytes, timeout_s: float) -> bytes:
        return orjson.dumps(await self._child.answer(message))


async def run_job(
    client: redis.asyncio.Redis, asked: AssembleJob, found: Telemetry, executors: Executors | None = None
) -> None:
    """One job, for which somebody waits."""
    await client.zadd(keys.waiters(asked.session_id, asked.request), {"api": 1e12})
    await JobRunner(client, client, executors or InProcess(client), found).run(FIRST, asked.to_json())


async def test_a_job_is_counted(fake: redis.asyncio.Redis) -> None:
    """Samples by status, leaves, stages; a linear session's retried turn is a dropped leaf."""
    store = Api(fake).store
    await record(store, turns=2)
    await store.append(SID, 3, replace(turn(3, 6, [1, 2, 3], [4]), parent=1))
    found = Telemetry()
    await run_job(fake, job(turn_id(3)), found)
    after = series(found)
    assert after["job_outcomes_total stored"] == after["job_duration_seconds_count"] == 1
    assert after["assembly_samples_total completed"] == 1
    assert (after["assembly_leaves_total picked"], after["assembly_leaves_total dropped"]) == (1, 1)
    assert after["turns_lost_total"] == 0
    for stage in telemetry.STAGES:
        assert after[f"job_stage_seconds_count {stage}"] == 1


async def test_a_lost_turn_is_counted(fake: redis.asyncio.Redis) -> None:
    """Turns that were acknowledged and are not in the stream any more are counted, one by one."""
    await record(Api(fake).store, turns=2)
    found = Telemetry()
    assert series(found)["turns_lost_total"] == 0
    await run_job(fake, job(turn_id(5)), found)
    after = series(found)
    assert after["turns_lost_total"] == 3
    assert after["job_refusals_total stream_corrupt"] == 1


async def test_mismatches_are_counted_by_type(fake: redis.asyncio.Redis) -> None:
    """The entries that an assembly found count under their types, over all jobs."""
    session = Conversation(Api(fake).store)
    await session.open("linear")
    found, executors = Telemetry(), InProcess(fake, session.renderer)
    await run_job(fake, job(await session.say(0, "assistant_text")), found, executors)
    await session.say(1, "assistant_text")
    await run_job(fake, job(await session.say(2, "special_token_type")), found, executors)
    after = series(found)
    assert {kind: after[f"assembly_mismatches_total {kind}"] for kind in MISMATCHES} == {
        "special_token_count": 0,
        "special_token_type": 1,
        "non_assistant_text": 0,
        "assistant_text": 3,
    }


def answering(**fields: object) -> Stub:
    """A child process that gives this answer."""
    answer = {"outcome": "stored", "code": "", "detail": "", "timing_ms": {}, **fields}
    return Stub(lambda: orjson.dumps(answer))


async def test_what_a_child_counted_is_added_up(fake: redis.asyncio.Redis) -> None:
    """Every number that a child hands over is added under its label, job after job."""
    found, numbers = Telemetry(), [1, 2, 3, 4]
    counts = Counts(
        samples=dict(zip([status.value for status in Status], numbers, strict=True)),
        picked=5,
        dropped=6,
        tokens={fate: place for place, fate in enumerate(FATES, 1)},
        mismatches=dict(zip(MISMATCHES, numbers, strict=True)),
        lost=7,
    )
    for seq in (1, 2):
        await run_job(fake, job(turn_id(seq)), found, answering(counts=counts.to_json()))
    after = series(found)
    assert [after[f"assembly_samples_total {status.value}"] for status in Status] == [2, 4, 6, 8]
    assert [after[f"assembly_mismatches_total {kind}"] for kind in MISMATCHES] == [2, 4, 6, 8]
    assert (after["assembly_leaves_total picked"], after["assembly_leaves_total dropped"]) == (10, 12)
    assert [after[f"assembly_tokens_total {fate}"] for fate in FATES] == [
        2 * place for place in range(1, len(FATES) + 1)
    ]
    assert after["turns_lost_total"] == 14


async def test_stages_are_shown_in_seconds(fake: redis.asyncio.Redis) -> None:
    """The milliseconds that a child measured; a refused job has only the stages before its refusal."""
    found = Telemetry()
    whole = {"fold": 1500.0, "assemble": 250.0, "encode": 2000.0}
    await run_job(fake, job(turn_id(1)), found, answering(timing_ms=whole))
    await run_job(fake, job(turn_id(2)), found, answering(timing_ms={"fold": 500.0}))
    after = series(found)
    assert {
        stage: (after[f"job_stage_seconds_count {stage}"], after[f"job_stage_seconds_sum {stage}"])
        for stage in telemetry.STAGES
    } == {"fold": (2, 2.0), "assemble": (1, 0.25), "encode": (1, 2.0)}


async def test_a_failure_is_no_refusal(fake: redis.asyncio.Redis) -> None:
    """A failed job counts as that, whatever its code; only an error that is stored is a refusal."""
    found = Telemetry()
    failed = answering(outcome="failed", code="store_unavailable", detail="Redis cannot be reached")
    await run_job(fake, job(turn_id(1)), found, failed)
    after = series(found)
    assert after["job_outcomes_total failed"] == 1
    assert [after[f"job_refusals_total {code}"] for code in telemetry.CODES] == [0] * len(telemetry.CODES)


async def test_a_job_that_nobody_waits_for(fake: redis.asyncio.Redis) -> None:
    """A dropped job counts as that, and its duration too."""
    found = Telemetry()
    await JobRunner(fake, fake, InProcess(fake), found).run(FIRST, job(turn_id(1)).to_json())
    after = series(found)
    assert outcomes(after) == {
        "stored": 0,
        "failed": 0,
        "dropped": 1,
        "interrupted": 0,
    }
    assert after["job_duration_seconds_count"] == 1


async def test_one_line_for_each_job(fake: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """A job's line says which request, which try, how it ended and why, and how long its stages took."""
    caplog.set_level(logging.INFO, "tokentape.assembler")
    await record(Api(fake).store, turns=1)
    asked, refused, failed = job(turn_id(1)), job(turn_id(2)), job(turn_id(3))
    await run_job(fake, asked, Telemetry())
    await run_job(fake, refused, Telemetry())
    await run_job(fake, failed, Telemetry(), answering(outcome="failed", detail="it was ended"))
    records = [line for line in caplog.records if line.getMessage() == "job"]
    lines = [line.__dict__["fields"] for line in records]
    assert [line.levelname for line in records] == ["INFO", "INFO", "WARNING"]
    assert [line["request"] for line in lines] == [asked.request, refused.request, failed.request]
    assert [line["try"] for line in lines] == [1, 1, 1]
    assert [line["outcome"] for line in lines] == ["stored", "stored", "failed"]
    assert [list(line["stages"]) for line in lines] == [list(telemetry.STAGES), [], []]
    assert (lines[1]["code"], lines[2]["detail"]) == ("stream_corrupt", "it was ended")
    assert not lines[0].get("code")
    assert all(line["duration_ms"] > 0 for line in lines)


async def test_a_job_that_fails(fake: redis.asyncio.Redis) -> None:
    """A child that dies is a failed job; Redis that goes away interrupts one; each counts once."""

    class Dies:
        async def run(self, message: bytes, timeout_s: float) -> bytes:
            raise ChildDied("gone")

    found = Telemetry()
    asked = job(turn_id(1))
    await fake.zadd(keys.waiters(SID, asked.request), {"api": 1e12})
    await JobRunner(fake, fake, Dies(), found).run(FIRST, asked.to_json())
    with pytest.raises(RuntimeError), found.job(asked, 1):
        raise RuntimeError
    after = series(found)
    assert outcomes(after) == {
        "stored": 0,
        "failed": 1,
        "dropped": 0,
        "interrupted": 1,
    }


def test_label_sets_are_those_of_the_code() -> None:
    """The codes and types that the parent process spells out are those of the modules it does not import."""
    assert list(telemetry.CODES) == [error.code for error in REFUSALS]
    assert telemetry.MISMATCHES == MISMATCHES


CHILD = """
import os, sys, time
if os.path.exists(sys.argv[1]): sys.exit(3)
sys.stdin.readline()
print("{}", flush=True)
for line in sys.stdin: os._exit(3) if line == "die\\n" else time.sleep(60)
"""
"""Cannot start where its argument is a file; else it ends at the message `die`, and answers none."""


def restarts(found: Telemetry) -> dict[str, float]:
    """Reason → restarts, of the reasons that came."""
    after = series(found)
    counts = {reason: after[f"children_restarts_total {reason}"] for reason in telemetry.RESTARTS}
    return {reason: count for reason, count in counts.items() if count}


@pytest.fixture
async def counted(tmp_path: Path) -> AsyncIterator[tuple[Executor, Telemetry]]:
    """A child process that has started, and what counts its restarts."""
    found = Telemetry()
    command = [sys.executable, "-c", CHILD, str(tmp_path / "broken")]
    executor = Executor(command, b"", lambda why: found.restarts[why].inc())
    await executor.start()
    yield executor, found
    await executor.close()


@pytest.mark.parametrize(
    ("message", "reason"),
    [(b"hang", "timeout"), (b"die", "exited"), (b"", "killed"), (b"hang", "abandoned")],
    ids=["timeout", "exited", "killed", "abandoned"],
)
async def test_restarts_are_counted_by_reason(
    counted: tuple[Executor, Telemetry], message: bytes, reason: str
) -> None:
    """Why a child is replaced: it took too long, ended, was killed by somebody else, or for want of a waiter.

    What it was the first time says nothing of the second.
    """
    executor, found = counted
    if reason == "abandoned":
        run = asyncio.create_task(executor.run(message, 60))
        await asyncio.sleep(0.05)
        run.cancel()
        await asyncio.wait({run})
    elif message:
        with pytest.raises(ExecutorError, match="child process"):
            await executor.run(message, 1.0)
    else:
        psutil.Process(executor.pid).kill()
    await until(lambda: bool(restarts(found)))
    assert restarts(found) == {reason: 1}
    await until(lambda: executor.ready)
    psutil.Process(executor.pid).kill()
    await until(lambda: sum(restarts(found).values()) == 2)
    assert restarts(found) == ({"killed": 2} if reason == "killed" else {reason: 1, "killed": 1})


async def test_a_failed_start_is_counted(counted: tuple[Executor, Telemetry], tmp_path: Path) -> None:
    """A new child that cannot start counts as that, beside the end of the one that it was to replace."""
    executor, found = counted
    (tmp_path / "broken").touch()
    psutil.Process(executor.pid).kill()
    await until(lambda: "failed_start" in restarts(found))
    assert restarts(found) == {"killed": 1, "failed_start": 1}
    (tmp_path / "broken").unlink()
    await until(lambda: executor.ready)
    assert restarts(found)["failed_start"] == 1


async def test_a_lost_lease_is_counted(client: redis.asyncio.Redis, api: Api) -> None:
    """A claim that is gone while its job runs counts once; one that is renewed does not."""
    found, stop, done = Telemetry(), asyncio.Event(), asyncio.Event()

    async def run(ctx: object, fields: object) -> None:
        await done.wait()

    worker = AssemblyWorker(arq_client(client), run, lambda: 1, stop, found.leases_lost.inc)
    running = asyncio.create_task(worker.main())
    await api.ask(job(turn_id(1)))
    await until(lambda: bool(worker.tasks))
    await asyncio.sleep(1.2)
    assert series(found)["leases_lost_total"] == 0
    for key in await client.keys("arq:in-progress:*"):
        await client.delete(key)
    await until(lambda: series(found)["leases_lost_total"] == 1, timeout_s=5)
    await asyncio.sleep(0.6)
    assert series(found)["leases_lost_total"] == 1
    stop.set()
    done.set()
    await running


async def test_a_job_continues_the_trace(fake: redis.asyncio.Redis) -> None:
    """The span `assemble job` belongs to the trace that the job brings, and names the session."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    await record(Api(fake).store, turns=1)
    asked = job(turn_id(1))
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    traced = AssembleJob(**{**asked.to_json(), "trace": {"traceparent": f"00-{trace}-{parent}-01"}})
    assert (traced, traced.job_id) == (asked, asked.job_id)
    await run_job(fake, traced, Telemetry(OpenTelemetry(provider)))
    [span] = spans.get_finished_spans()
    assert span.name == "assemble job"
    assert f"{span.context.trace_id:032x}" == trace
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == parent
    assert span.attributes is not None
    assert span.attributes["tokentape.session"] == SID
    assert span.attributes["tokentape.outcome"] == "stored"
    provider.shutdown()


async def test_the_endpoint(server: Server, tokenizer: Path, tmp_path: Path, api: Api) -> None:
    """A worker answers scrapes and probes: not ready without children or Redis, alive all the same."""
    worker = WorkerProcess.start(tmp_path, server.url, tokenizer, metrics_port=0)
    try:
        await until(lambda: "metrics and probes at" in worker.log, timeout_s=60)
        url = worker.log.partition("metrics and probes at ")[2].partition('"')[0]
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
            assert (await http.get("/health")).json() == {"status": "ok"}
            await worker.ready()
            ready = await http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (200, True)
            await api.ask(job(await record(api.store, turns=2)))
            await api.heard()
            await until(lambda: len(worker.jobs) == 1)
            text = (await http.get("/metrics")).text
            assert 'tokentape_job_outcomes_total{outcome="stored"} 1.0' in text
            assert "tokentape_children_ready 1.0" in text
            assert "tokentape_turns_lost_total 0.0" in text
            assert (await http.get("/nowhere")).status_code == 404
            assert (await http.post("/health")).status_code == 405
            server.stop()
            lost = await http.get("/ready")
            assert (lost.status_code, lost.json()["checks"]["children"]) == (503, "ok")
            assert (await http.get("/health")).status_code == 200
            server.start()
    finally:
        worker.kill()


async def test_a_worker_process_shows_what_befalls_it(
    server: Server, tokenizer: Path, tmp_path: Path, api: Api
) -> None:
    """A running job, its lost claim and its killed child are in the scrapes, each once; so is the lag."""
    worker = WorkerProcess.start(tmp_path, server.url, tokenizer, metrics_port=0)
    try:
        await worker.ready()
        url = worker.log.partition("metrics and probes at ")[2].partition('"')[0]
        async with httpx.AsyncClient(base_url=url, trust_env=False) as http:

            async def shows(name: str, value: float) -> bool:
                return series_of((await http.get("/metrics")).text)[name] == value

            assert await shows("jobs_running", 0)
            child = worker.child
            child.suspend()
            await api.ask(job(await record(api.store, turns=1)))
            await until(lambda: shows("jobs_running", 1))
            for key in await api.client.keys("arq:in-progress:*"):
                await api.client.delete(key)
            await until(lambda: shows("leases_lost_total", 1))
            child.kill()
            await until(lambda: shows("children_ready", 0))
            assert (await api.heard())["outcome"] == "failed"
            await until(lambda: shows("children_ready", 1), timeout_s=60)
            await until(lambda: shows("jobs_running", 0))
            after = series_of((await http.get("/metrics")).text)
            assert after["children_restarts_total killed"] == after["leases_lost_total"] == 1
            assert after["job_outcomes_total failed"] == after["job_duration_seconds_count"] == 1
            assert after["worker_loop_lag_seconds_count"] > 0
    finally:
        worker.kill()


async def test_the_endpoint_bears_strangers(fake: redis.asyncio.Redis) -> None:
    """A peer that says nothing, too much or nonsense does no harm."""
    endpoint = Endpoint(Telemetry(), [fake], lambda: 0, "127.0.0.1", 0)
    async with endpoint:
        port = endpoint.port
        for sent in (b"", b"x" * 100_000, b"\0\r\n\r\n", b"GET\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            assert (await http.get("/ready?x=1")).json()["checks"] == {
                "redis": "ok",
                "children": "no child process is ready",
            }
        with pytest.raises(ValueError, match="metrics-port"):
            await Endpoint(Telemetry(), [fake], lambda: 0, "127.0.0.1", port).__aenter__()
