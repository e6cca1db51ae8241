"""`GET /ready`: the engine is probed once, in the background, and every answer comes in time."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.support.scripted import ScriptedEngine
from tokentape_contracts import limits
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.store import MemoryStore

READY = {"ready": True, "checks": {"redis": "ok", "engine": "ok"}}


def stripped(engine: ScriptedEngine) -> Callable[[dict[str, Any]], httpx.Response]:
    """Answers of a router that strips meta_info."""
    return lambda body: httpx.Response(200, json=engine.reply(body, "hi", choice={"meta_info": None}))


async def test_a_success_is_remembered(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """Concurrent and later calls share one probe, which is two generations."""
    replies = await asyncio.gather(*(api.get("/ready") for _ in range(5)))
    replies.append(await api.get("/ready"))
    assert [(reply.status_code, reply.json()) for reply in replies] == [(200, READY)] * 6
    assert len(engine.bodies) == 2


async def test_a_failure_is_told_and_repeated(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """A router that strips fields is 503 with the failing lines, until it does not any more."""
    engine.answer = stripped(engine)
    for count in (1, 2):
        reply = await api.get("/ready")
        assert (reply.status_code, reply.json()["ready"]) == (503, False)
        lines = {line["name"]: line for line in reply.json()["checks"]["probe"]}
        assert lines["ids"]["state"] == "missing"
        assert "router" in lines["ids"]["detail"]
        assert "reachable" not in lines
        assert len(engine.bodies) == count
    engine.answer = None
    assert (await api.get("/ready")).json() == READY


async def test_not_ready_before_the_engine_is(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """A new process takes no request before it has seen a healthy engine that sends what is recorded."""
    engine.take_over = lambda _: httpx.Response(503)
    reply = await api.get("/ready")
    assert (reply.status_code, reply.json()["checks"]["engine"]) == (503, "the engine's /health answers 503")
    assert "probe" not in reply.json()["checks"]
    engine.take_over = None
    assert (await api.get("/ready")).json() == READY


async def test_an_engine_that_goes_away_leaves_the_process_ready(
    api: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    """Collects and deletes need no engine; when it is back it is probed again, as it may be another one."""
    await api.get("/ready")
    engine.take_over = lambda _: httpx.Response(503)
    reply = await api.get("/ready")
    checks = {"redis": "ok", "engine": "the engine's /health answers 503"}
    assert (reply.status_code, reply.json()) == (200, {"ready": True, "checks": checks})
    engine.take_over = None
    engine.answer = stripped(engine)
    reply = await api.get("/ready")
    assert (reply.status_code, reply.json()["ready"]) == (200, True)
    assert "meta_info" in reply.text
    engine.answer = None
    assert (await api.get("/ready")).json() == READY
    assert len(engine.bodies) == 5  # the failed probe did without the second generation


async def test_not_ready_without_redis(
    api: httpx.AsyncClient, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be served then, whatever the engine once did."""
    await api.get("/ready")

    async def away() -> None:
        raise StoreUnavailable("Redis cannot be reached: refused")

    monkeypatch.setattr(store, "ready", away)
    reply = await api.get("/ready")
    checks = {"redis": "Redis cannot be reached: refused", "engine": "ok"}
    assert (reply.status_code, reply.json()) == (503, {"ready": False, "checks": checks})


async def test_not_ready_without_announcements(
    app: Starlette, api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process whose reader of announcements has ended says so, and is not ready any more."""
    assert (await api.get("/ready")).status_code == 200
    task = app.state.services.collector._task
    task.cancel()
    await asyncio.wait({task})
    reply = await api.get("/ready")
    assert reply.status_code == 503
    assert "the reader has ended" in reply.json()["checks"]["announcements"]


async def test_a_slow_probe(
    api: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/ready does not wait for a slow probe; its result is told once it is there, good or bad."""
    monkeypatch.setattr(limits, "READY_TIMEOUT_S", 0.1)
    release = asyncio.Event()

    async def answer(body: dict[str, Any]) -> httpx.Response:
        await release.wait()
        return stripped(engine)(body)

    engine.answer = answer
    for _ in range(2):
        reply = await api.get("/ready")
        assert reply.status_code == 503
        assert reply.json()["checks"] == {
            "redis": "ok",
            "engine": "ok",
            "probe": "the probe is still running",
        }
    release.set()
    await asyncio.sleep(0.05)
    assert "meta_info" in (await api.get("/ready")).text
    assert len(engine.bodies) == 1


async def test_a_probe_that_never_ends(
    api: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe has a limit of its own, and has failed beyond it."""
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_S", 0.05)

    async def answer(_: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError("not cancelled")

    engine.answer = answer
    reply = await api.get("/ready")
    assert reply.status_code == 503
    assert "did not end within 0.05 s" in reply.text


async def test_unhealthy_while_the_probe_runs(
    api: httpx.AsyncClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that was running when the engine became unhealthy counts for nothing."""
    monkeypatch.setattr(limits, "READY_TIMEOUT_S", 0.1)

    async def answer(body: dict[str, Any]) -> httpx.Response:
        if len(engine.bodies) == 1:
            await asyncio.sleep(60)
        return httpx.Response(200, json=engine.reply(body, "hi"))

    engine.answer = answer
    await api.get("/ready")
    engine.take_over = lambda _: httpx.Response(503)
    await api.get("/ready")
    engine.take_over = None
    assert (await api.get("/ready")).json() == READY
    assert len(engine.bodies) == 3
