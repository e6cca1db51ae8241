"""Whole worker processes with real children, and what may happen to them."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.assembler.support import SID, Api, Server, WorkerProcess, job, record, until
from tokentape_contracts.events import SessionSealed
from tokentape_contracts.samples import decode_samples
from tokentape_core.text.tokenizer import Tokenizer

Start = Callable[[], WorkerProcess]


async def test_a_session_becomes_samples(start_worker: Start, tokenizer: Path, api: Api) -> None:
    """Two API processes that ask for the same samples both hear of the one stored result.

    The session was deleted after the request was accepted, which changes nothing.
    """
    worker = await start_worker().ready()
    other = Api(api.client, "api-2")
    asked = job(await record(api.store, turns=3))
    await api.store.seal(SID, SessionSealed(id="f" * 32, reason="deleted", sealed_at=9.0))
    await asyncio.gather(api.ask(asked), other.ask(asked))
    assert [(await heard)["outcome"] for heard in (api.heard(), other.heard())] == ["stored", "stored"]
    result = await api.result(asked)
    assert result is not None
    (sample,) = decode_samples(result.payload, contract=2).samples
    assert sample["response"] == Tokenizer.load(str(tokenizer)).decode(sample["tokens"][3:])
    assert [line["outcome"] for line in worker.jobs] == ["stored"]


async def test_a_child_is_killed(start_worker: Start, api: Api) -> None:
    """A child that dies in mid-job costs one announced failure; the next request gets samples."""
    worker = await start_worker().ready()
    asked = job(await record(api.store, turns=1))
    child = worker.child
    child.suspend()
    await api.ask(asked)
    await asyncio.sleep(0.2)
    child.kill()
    heard = await api.heard()
    assert (heard["outcome"], heard["detail"]) == ("failed", "the child process was killed by SIGKILL")
    assert await api.result(asked) is None
    await api.ask_anew(asked)
    assert (await api.heard())["outcome"] == "stored"


async def test_a_deadline_frees_the_worker(start_worker: Start, api: Api) -> None:
    """Within a second of a passed deadline the child is gone; nothing was stored or announced."""
    worker = await start_worker().ready()
    asked = job(await record(api.store, turns=1))
    child = worker.child
    child.suspend()
    await api.ask(asked, deadline_s=0.5)
    await until(lambda: not child.is_running(), timeout_s=0.5 + 1.0)
    await until(lambda: "dropped" in [line["outcome"] for line in worker.jobs])
    assert await api.result(asked) is None
    await api.ask_anew(asked)
    assert (await api.heard())["outcome"] == "stored"


async def test_a_worker_is_killed(start_worker: Start, api: Api) -> None:
    """The job of a worker that is killed in the middle is run by another one within seconds."""
    victim = await start_worker().ready()
    asked = job(await record(api.store, turns=1))
    child = victim.child
    child.suspend()
    await api.ask(asked)
    await asyncio.sleep(0.3)
    heir = await start_worker().ready()
    assert await api.result(asked) is None
    # In this order: a worker that lives to see its child end would announce a failure.
    victim.kill()
    child.kill()
    assert (await api.heard())["outcome"] == "stored"
    assert await api.result(asked) is not None
    await until(lambda: ("stored", 2) in [(line["outcome"], line["try"]) for line in heir.jobs])


async def test_no_orphans(start_worker: Start, api: Api) -> None:
    """A worker that is killed leaves no child process, also not one with a job in hand."""
    worker = await start_worker().ready()
    child = worker.child
    child.suspend()
    await api.ask(job(await record(api.store, turns=1)))
    await asyncio.sleep(0.2)
    os.kill(worker.process.pid, signal.SIGKILL)
    child.resume()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, timeout_s=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signals_drain(start_worker: Start, api: Api, number: signal.Signals) -> None:
    """SIGTERM and SIGINT, also to the whole process group, let the running job end; the exit code is 0."""
    worker = await start_worker().ready()
    asked = job(await record(api.store, turns=1))
    child = worker.child
    child.suspend()
    await api.ask(asked)
    await asyncio.sleep(0.2)
    os.killpg(worker.process.pid, number)
    os.kill(child.pid, number)
    await asyncio.sleep(0.3)
    child.resume()
    assert (await api.heard())["outcome"] == "stored"
    assert await worker.ended() == 0
    assert not child.is_running()


async def test_a_restart_of_redis(start_worker: Start, server: Server, api: Api) -> None:
    """A restart of Redis costs neither worker nor child."""
    worker = await start_worker().ready()
    child = worker.child
    asked = job(await record(api.store, turns=1))
    server.stop()
    await asyncio.sleep(0.5)
    server.start()
    await api.ask(asked)
    assert (await api.heard())["outcome"] == "stored"
    assert worker.child == child


async def test_a_failed_start(server: Server, tmp_path: Path) -> None:
    """A worker without a tokenizer, or with a URL that is none, ends at once with what the command tells."""
    missing = WorkerProcess.start(tmp_path, server.url, tmp_path / "nowhere")
    wrong = WorkerProcess.start(tmp_path, "http://localhost", tmp_path)
    assert [await missing.ended(60), await wrong.ended(60)] == [1, 1]
    *_, why_missing = missing.log.splitlines()
    *_, why_wrong = wrong.log.splitlines()
    assert f"TokenizerError: no tokenizer at {tmp_path}/nowhere" in why_missing
    assert why_wrong.startswith("ValueError: a Redis URL must begin")
