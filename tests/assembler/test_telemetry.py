"""What a worker process tells about itself: metrics, spans and log lines, and its HTTP endpoint."""

import asyncio
import sys
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
from tests.assembler.test_job import FIRST
from tokentape_assembler import telemetry
from tokentape_assembler.child import Child
from tokentape_assembler.counts import Counts
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.executor import ChildDied, Executor
from tokentape_assembler.job import JobRunner
from tokentape_assembler.outcome import MISMATCHES, REFUSALS
from tokentape_assembler.telemetry import Telemetry
from tokentape_assembler.worker import AssemblyWorker, arq_client
from tokentape_contracts import keys
from tokentape_contracts.jobs import AssembleJob
from tokentape_core.domain.state import turn_id
from tokentape_core.tracing import OpenTelemetry


def series(found: Telemetry) -> dict[str, float]:
    """Name and labels → value of all series that are ours."""
    text = found.meter.expose().decode()
    return {
        sample.name.removeprefix("tokentape_")
        + "".join(f" {v}" for v in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("tokentape_") and not sample.name.endswith("_bucket")
    }


class InProcess:
    """Runs jobs in this process, as a child process would."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._child = Child(client, lambda ids: "text")

    async def run(self, message: bytes, timeout_s: float) -> bytes:
        return orjson.dumps(await self._child.answer(message))


async def run_job(client: redis.asyncio.Redis, asked: AssembleJob, found: Telemetry) -> None:
    """One job, for which somebody waits."""
    await client.zadd(keys.waiters(asked.session_id, asked.request), {"api": 1e12})
    await JobRunner(client, client, InProcess(client), found).run(FIRST, asked.to_json())


async def test_a_job_is_counted(fake: redis.asyncio.Redis) -> None:
    """Samples by status, leaves, stages; a linear session's retried turn is a dropped leaf."""
    store = Api(fake).store
    await record(store, turns=2)
    await store.append(SID, 3, replace(turn(3, 6, [1, 2, 3], [4]), parent=1))
    found = Telemetry()
    await run_job(fake, job(turn_id(3)), found)
    after = series(found)
    assert after["job_outcomes_total stored"] == 1
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


def test_mismatches_are_counted_by_type() -> None:
    """The entries that an assembly found count under their types."""
    found = Telemetry()
    with found.job(job(turn_id(1)), 1):
        found.ended("stored", "", {}, Counts(mismatches={"assistant_text": 2}))
    assert series(found)["assembly_mismatches_total assistant_text"] == 2
    assert series(found)["assembly_mismatches_total non_assistant_text"] == 0


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
    assert {outcome: after[f"job_outcomes_total {outcome}"] for outcome in telemetry.OUTCOMES} == {
        "stored": 0,
        "failed": 1,
        "dropped": 0,
        "interrupted": 1,
    }


def test_label_sets_are_those_of_the_code() -> None:
    """The codes and types that the parent process spells out are those of the modules it does not import."""
    assert list(telemetry.CODES) == [error.code for error in REFUSALS]
    assert telemetry.MISMATCHES == MISMATCHES


@pytest.mark.parametrize(
    ("message", "reason"), [(b"hang", "timeout"), (b"die", "exited"), (b"", "killed")], ids=str
)
async def test_restarts_are_counted_by_reason(message: bytes, reason: str) -> None:
    """Why a child is replaced: it took too long, ended, or was killed by somebody else."""
    program = (
        "import os, sys, time; sys.stdin.readline(); print('{}', flush=True)\n"
        "for line in sys.stdin: os._exit(3) if line == 'die\\n' else time.sleep(60)"
    )
    found = Telemetry()
    executor = Executor([sys.executable, "-c", program], b"", lambda why: found.restarts[why].inc())
    await executor.start()
    if message:
        with pytest.raises(Exception, match="child process"):
            await executor.run(message, 1.0)
    else:
        psutil.Process(executor.pid).kill()
    await until(lambda: series(found)[f"children_restarts_total {reason}"] == 1)
    await executor.close()


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
