"""Bounds of the API process: what is allowed at each, and what one more gives."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.api.conftest import OpenSession
from tests.api.test_collector import JOB, RESULT, client, collector, server, worker  # noqa: F401
from tests.api.test_collector import store as store_result
from tests.api.test_refusals import check
from tests.support.scripted import ScriptedEngine
from tests.support.sessions import opened, turn
from tokentape_api import prompts
from tokentape_api.cache import Sessions, _size
from tokentape_api.collect import Collector
from tokentape_api.engine import EngineRefusal, SGLangEngine
from tokentape_api.settings import ApiSettings
from tokentape_contracts import limits
from tokentape_contracts.errors import DeadlineExceeded, EngineUnavailable, QueueFull
from tokentape_contracts.http import SamplesRequest
from tokentape_core.store import MemoryStore

USER = {"role": "user", "content": "Hello"}


# Requests


async def test_small_bodies(session: OpenSession) -> None:
    """Opening and collecting read a body of exactly the limit; one byte more is 413."""
    for path, status in (("/sessions", 200), (f"{session.url}/samples", 504)):
        body = b'{"labels": {}}' if path == "/sessions" else b'{"deadline_s": 0.05}'
        at = body + b" " * (limits.SMALL_BODY_BYTES - len(body))
        assert (await session.api.post(path, content=at)).status_code == status
        await check(await session.api.post(path, content=at + b" "), 413, "request_too_large")


async def test_forwarded_bodies(session: OpenSession, engine: ScriptedEngine) -> None:
    """The catch-all forwards a body of exactly the limit; one byte more is 413, the engine not asked."""
    at = b"x" * limits.PROXY_BODY_BYTES
    engine.take_over = lambda request: httpx.Response(200, content=str(len(request.content)))
    assert (await session.api.post(f"{session.url}/tokenize", content=at)).text == str(len(at))
    await check(
        await session.api.post(f"{session.url}/tokenize", content=at + b"x"), 413, "request_too_large"
    )
    assert len(engine.requests) == 1


async def test_forwarded_targets(session: OpenSession, engine: ScriptedEngine) -> None:
    """Path and query are forwarded up to their limit, and refused one character beyond."""
    for path in ("x" * limits.PROXY_TARGET_CHARS, "x?" + "q" * (limits.PROXY_TARGET_CHARS - 1)):
        assert (await session.api.get(f"{session.url}/{path}")).status_code == 200
        await check(await session.api.get(f"{session.url}/{path}x"), 400, "invalid_request")
    assert len(engine.requests) == 2


async def test_session_ids(api: httpx.AsyncClient, store: MemoryStore) -> None:
    """A session whose id has as many characters as the limit is found; a longer one is not looked for."""
    at, beyond = "i" * limits.SESSION_ID_CHARS, "i" * (limits.SESSION_ID_CHARS + 1)
    for session_id in (at, beyond):
        await store.open(session_id, opened())
    assert (await api.get(f"/sessions/{at}?view=events")).status_code == 200
    await check(await api.get(f"/sessions/{beyond}?view=events"), 404, "session_not_found")


# Sessions


async def test_session_ids_are_unguessable(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An id is 122 bits of the operating system's random numbers, and says nothing about the next."""
    ids = [(await api.post("/sessions")).json()["session_id"] for _ in range(50)]
    assert all(len(session_id) == 32 and int(session_id, 16) for session_id in ids)
    assert len({session_id[:8] for session_id in ids}) == len({session_id[-8:] for session_id in ids}) == 50
    # A mask of all that ever differed: were it a counter or a clock, most bits would never change.
    differing = 0
    for session_id in ids:
        differing |= int(session_id, 16) ^ int(ids[0], 16)
    assert differing.bit_count() == 122
    taken: list[int] = []
    monkeypatch.setattr("os.urandom", lambda n: taken.append(n) or bytes(range(n)))  # type: ignore[func-returns-value]
    reply = await api.post("/sessions")
    assert taken.count(16) >= 1
    assert reply.json()["session_id"] == "000102030405460788090a0b0c0d0e0f"


async def test_sessions_of_a_tenant(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without tokens all sessions are of one tenant; one too many is 429 with a time to wait."""
    monkeypatch.setattr(limits, "SESSIONS_PER_TENANT", 2)
    first, _ = [(await api.post("/sessions")).json()["session_id"] for _ in range(2)]
    reply = await api.post("/sessions")
    await check(reply, 429, "too_many_sessions", "2 sessions are open")
    assert reply.headers["retry-after"] == str(limits.SESSIONS_RETRY_AFTER_S)
    assert (await api.delete(f"/sessions/{first}")).status_code == 204
    assert (await api.post("/sessions")).status_code == 200


# The process


async def test_the_cache_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that fill the cache to the byte stay; one byte more, and the least recent is read again."""
    store, event = MemoryStore(), turn()
    unused: Any = _Counted()
    reads: list[str] = []
    read = store.read

    async def counting(session_id: str, **range_: Any) -> Any:
        if range_["after"] is None:
            reads.append(session_id)
        return await read(session_id, **range_)

    monkeypatch.setattr(store, "read", counting)
    for session_id in ("a", "b"):
        await store.open(session_id, opened())
        await store.append(session_id, 1, event)
    for bytes_, expected in ((2 * _size(event), ["a", "b"]), (2 * _size(event) - 1, ["a", "b", "a"])):
        reads.clear()
        cached = Sessions(store, unused, cache_bytes=bytes_)
        for session_id in ("a", "b", "a"):
            await cached.load(session_id)
        assert reads == expected


class _Counted:
    """Metrics that nobody reads."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __getitem__(self, _: str) -> Any:
        return self


@pytest.mark.parametrize(("takes_s", "status"), [(0.5, 200), (5.0, 504)])
async def test_a_generation(
    session: OpenSession, engine: ScriptedEngine, takes_s: float, status: int
) -> None:
    """A generation that ends within the engine's time is recorded (here 1 s); a longer one is 504."""

    async def answer(body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(takes_s)
        return httpx.Response(200, json=engine.reply(body, "fine"))

    engine.answer = answer
    assert (await session.chat(USER)).status_code == status
    assert len(await session.records()) == (status == 200)


async def test_the_default_of_a_generation() -> None:
    """Who names no time gets that of the limits."""
    settings = ApiSettings(engine_url="http://e", tokenizer="t", redis_url="-")
    assert settings.engine_timeout_s == limits.ENGINE_TIMEOUT_S


async def test_an_answer_of_the_engine(
    session: OpenSession, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is taken up to its limit; one byte more is 502, and what would follow is not read."""
    limit = 10_000
    monkeypatch.setattr(limits, "ENGINE_REPLY_BYTES", limit)

    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        yield content[:limit]
        if len(content) > limit:
            yield content[limit:]
            raise AssertionError("read on")

    def answer_of(size: int) -> Callable[[dict[str, Any]], httpx.Response]:
        return lambda body: httpx.Response(
            200, content=pieces(json.dumps(engine.reply(body, "fine")).encode().ljust(size))
        )

    engine.answer = answer_of(limit)
    assert (await session.chat(USER)).status_code == 200
    engine.answer = answer_of(limit + 1)
    await check(await session.chat(USER), 502, "engine_reply_invalid", f"longer than {limit} bytes")
    assert len(await session.records()) == 1


async def test_a_refusal_of_the_engine(
    session: OpenSession, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is passed on up to the limit of an answer; a longer one is 502."""
    monkeypatch.setattr(limits, "ENGINE_REPLY_BYTES", 1000)
    engine.answer = lambda _: httpx.Response(400, content=b"x" * 1000)
    assert (await session.chat(USER)).content == b"x" * 1000
    engine.answer = lambda _: httpx.Response(400, content=b"x" * 1001)
    await check(await session.chat(USER), 502, "engine_reply_invalid", "longer than 1000 bytes")


@pytest.fixture
async def slow_engine() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """A server on loopback whose answers wait for an event."""
    release = asyncio.Event()

    async def endpoint(_: Request) -> Response:
        await release.wait()
        return Response("{}")

    app = Starlette(routes=[Route("/{path:path}", endpoint)])
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None)
    made = uvicorn.Server(config)
    task = asyncio.create_task(made.serve())
    while not made.started:
        await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{made.servers[0].sockets[0].getsockname()[1]}", release
    release.set()
    made.should_exit = True
    await task


async def test_connections_to_the_engine(
    slow_engine: tuple[str, asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many requests as the limit run at the same time; one more waits, and not for ever."""
    monkeypatch.setattr(limits, "ENGINE_CONNECTIONS", 2)
    url, release = slow_engine
    engine = SGLangEngine(url, timeout_s=0.5)

    async def ask() -> int:
        async with engine.forward("s", "GET", "v1/models", "", {}, b"") as reply:
            return reply.status

    running = [asyncio.create_task(ask()) for _ in range(2)]
    await asyncio.sleep(0.2)
    third = asyncio.create_task(ask())
    await asyncio.sleep(0.1)
    release.set()
    assert await asyncio.gather(*running, third) == [200, 200, 200]
    release.clear()
    held = [asyncio.create_task(ask()) for _ in range(2)]
    await asyncio.sleep(0.05)
    engine._timeout_s = 0.1
    engine._client.timeout = httpx.Timeout(5.0, pool=0.1)
    with pytest.raises(EngineUnavailable):
        await ask()
    release.set()
    await asyncio.gather(*held)
    await engine.close()


@pytest.mark.parametrize(("pause_s", "connections"), [(0.0, 1), (0.6, 2)])
@pytest.mark.parametrize("way", ["forward", "generate"])
async def test_idle_connections_to_the_engine(
    monkeypatch: pytest.MonkeyPatch, way: str, pause_s: float, connections: int
) -> None:
    """A connection is used again within the idle time, and a new one is made after it."""
    monkeypatch.setattr(limits, "ENGINE_KEEP_ALIVE_S", 0.2)
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if length := re.search(rb"content-length: (\d+)", head.lower()):
                    await reader.readexactly(int(length[1]))
                writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = SGLangEngine(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", timeout_s=5)

    async def ask() -> None:
        if way == "generate":
            with pytest.raises(EngineRefusal):
                await engine.generate("s", np.array([1], np.int32), {}, {})
            return
        async with engine.forward("s", "GET", "v1/models", "", {}, b"") as reply:
            async for _ in reply.body:
                pass

    await ask()
    await asyncio.sleep(pause_s)
    await ask()
    assert made == connections
    await engine.close()
    listening.close()
    await asyncio.sleep(0.05)  # the handlers see the ends of their connections


@pytest.mark.parametrize("beyond", [0, 1])
async def test_text_that_is_rendered_inline(
    session: OpenSession, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """New messages and tools up to the limit are rendered on the loop; one byte more goes to a thread."""
    threads: list[Any] = []
    to_thread = asyncio.to_thread

    async def noting(function: Any, *given: Any) -> Any:
        threads.append(function)
        return await to_thread(function, *given)

    monkeypatch.setattr("tokentape_api.prompts.asyncio.to_thread", noting)
    message = {"role": "user", "content": ""}
    message["content"] = "x" * (limits.RENDER_INLINE_BYTES - len(orjson.dumps([[message], None])) + beyond)
    assert (await session.chat(message)).status_code == 200
    assert threads.count(prompts._render) == beyond


@pytest.mark.parametrize(("takes_s", "state"), [(0.05, "ok"), (1.0, "no answer within 0.3 s")])
async def test_readiness(
    api: httpx.AsyncClient,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    takes_s: float,
    state: str,
) -> None:
    """A Redis that answers within the time is ready; a slower one is not, and nobody waits longer for it."""
    monkeypatch.setattr(limits, "READY_TIMEOUT_S", 0.3)

    async def ready() -> None:
        await asyncio.sleep(takes_s)

    monkeypatch.setattr(store, "ready", ready)
    began = time.monotonic()
    assert (await api.get("/ready")).json()["checks"]["redis"] == state
    assert time.monotonic() - began < 0.9


@pytest.mark.parametrize(("takes_s", "ready"), [(0.05, True), (5.0, False)])
async def test_the_probe(
    api: httpx.AsyncClient,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    takes_s: float,
    ready: bool,
) -> None:
    """A probe that ends within its time counts; a longer one has failed."""
    monkeypatch.setattr(limits, "PROBE_TIMEOUT_S", 0.5)

    async def answer(body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(takes_s)
        return httpx.Response(200, json=engine.reply(body, "hi"))

    engine.answer = answer
    reply = await api.get("/ready")
    assert reply.json()["ready"] is ready
    assert ("did not end within 0.5 s" in reply.text) is not ready


# Samples


def test_deadlines_of_a_collect() -> None:
    """A body that names none gets the default, which is allowed."""
    assert SamplesRequest.parse(b"{}").deadline_s == limits.COLLECT_DEADLINE_S


async def test_the_queue(
    collector: Collector,  # noqa: F811
    worker: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collect that fills the queue is taken; one more is refused at once."""
    monkeypatch.setattr(limits, "QUEUE_DEPTH", 2)
    await worker.zadd("arq:queue", {"a": 1})
    with pytest.raises(DeadlineExceeded):
        await collector.collect(JOB, 0.1)
    assert await worker.zcard("arq:queue") == 2
    other = type(JOB)("sid", "1-0", uuid4().hex, 1, None, None)
    with pytest.raises(QueueFull, match="2 collects"):
        await collector.collect(other, 5)


async def test_a_full_queue_says_when_to_come_again(
    session: OpenSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 `queue_full` carries `Retry-After`."""
    monkeypatch.setattr(limits, "QUEUE_DEPTH", 0)
    reply = await session.api.post(f"{session.url}/samples", json={"deadline_s": 1})
    await check(reply, 503, "queue_full")
    assert reply.headers["retry-after"] == str(limits.QUEUE_RETRY_AFTER_S)


async def test_a_waiting_collect_looks_again(
    collector: Collector,  # noqa: F811
    worker: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result without an announcement is found after the slice, and not before."""
    monkeypatch.setattr(limits, "WAIT_SLICE_S", 0.4)
    waiting = asyncio.create_task(collector.collect(JOB, 10))
    await asyncio.sleep(0.1)
    await store_result(worker, RESULT)
    await asyncio.sleep(0.1)
    assert not waiting.done()
    assert (await asyncio.wait_for(waiting, 2)).first == b"payload"
