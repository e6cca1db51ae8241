"""Bounds of the API process: what is allowed at each, and what one more gives."""

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final
from unittest.mock import create_autospec
from uuid import uuid4

import httpx
import numpy as np
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from tests.api.conftest import OpenSession
from tests.api.test_collector import JOB, RESULT, client, collector, server, until_queued, worker  # noqa: F401
from tests.api.test_collector import store as store_result
from tests.api.test_refusals import check
from tests.support.application import application, served
from tests.support.scripted import ScriptedEngine, network
from tests.support.sessions import opened, sealed, turn
from tokentape_api.collect import Collector
from tokentape_api.dialects.chat import ChatCompletion
from tokentape_api.engine import EngineRefusal, SGLangEngine
from tokentape_api.http.server import BoundedHttp
from tokentape_api.recording.cache import Sessions
from tokentape_api.settings import ApiSettings
from tokentape_api.telemetry import Telemetry
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineTimeout, EngineUnavailable, QueueFull
from tokentape_contracts.http import SamplesRequest
from tokentape_core.domain.state import fold
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer

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


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
async def port(
    engine: ScriptedEngine, store: MemoryStore, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[int]:
    """The application behind the real HTTP server, with times that a test can wait for."""
    monkeypatch.setattr(limits, "REQUEST_HEAD_S", 0.5)
    monkeypatch.setattr(limits, "REQUEST_BODY_S", 0.5)
    async with served(application(renderer, store, network(engine.handle), timeout_s=30.0)) as port:
        yield port


@pytest.fixture
async def connection(port: int) -> AsyncIterator[Connection]:
    """A connection to it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()


def head(target: str, length: int = 0) -> bytes:
    return f"POST {target} HTTP/1.1\r\nHost: api\r\nContent-Length: {length}\r\n\r\n".encode()


async def reply_of(connection: Connection) -> tuple[int, bytes, bytes]:
    """Status, head and body of the next reply."""
    lines = await asyncio.wait_for(connection[0].readuntil(b"\r\n\r\n"), 10)
    length = re.search(rb"content-length: (\d+)", lines)
    assert length
    return int(lines.split()[1]), lines, await connection[0].readexactly(int(length[1]))


async def drip(connection: Connection, byte: bytes) -> None:
    """Sends the byte again and again until the other side hangs up."""
    while not connection[0].at_eof():
        connection[1].write(byte)
        await asyncio.sleep(0.1)


async def test_a_new_connection(renderer: ChatRenderer, store: MemoryStore, engine: ScriptedEngine) -> None:
    """A connection that never sends anything is closed like an idle one; it may wait up to then."""
    app = application(renderer, store, network(engine.handle))
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(served(app, keep_alive_s=1))
        used, silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.6)
        used[1].write(head("/sessions"))
        assert (await reply_of(used))[0] == 200
        assert await asyncio.wait_for(silent[0].read(), 5) == b""
        for _, writer in (used, silent):
            writer.close()


async def test_a_head_in_time(connection: Connection) -> None:
    """A head may come in pieces, and the time begins anew with the next one."""
    for _ in range(3):
        sent = head("/sessions")
        for start in range(0, len(sent), 20):
            connection[1].write(sent[start : start + 20])
            await asyncio.sleep(0.07)
        assert (await reply_of(connection))[0] == 200
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("sent", "more"),
    [(b"P", b""), (b"\r\n", b""), (b"POST / HTTP/1.1\r\nA: ", b""), (b"POST / HTTP/1.1\r\nA: ", b"x")],
    ids=["a byte", "a line", "half", "dripping"],
)
@pytest.mark.parametrize("earlier", [0, 1])
async def test_a_head_that_does_not_end(
    connection: Connection, sent: bytes, more: bytes, earlier: int
) -> None:
    """It is 400 when its time is over, on a new connection and a used one, and however much still comes."""
    for _ in range(earlier):
        connection[1].write(head("/sessions"))
        assert (await reply_of(connection))[0] == 200
    connection[1].write(sent)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        if more:
            group.create_task(drip(connection, more))
        status, lines, text = await reply_of(connection)
        assert (status, text) == (400, b"The head of the request did not come to its end in time.")
        assert b"connection: close" in lines
        assert await connection[0].read() == b""


async def test_half_a_head_behind_a_request(connection: Connection, engine: ScriptedEngine) -> None:
    """It breaks no answer off that is still being made."""
    connection[1].write(head("/sessions"))
    session = json.loads((await reply_of(connection))[2])["session_id"]

    async def late(body: dict[str, Any]) -> httpx.Response:
        await asyncio.sleep(1.0)
        return httpx.Response(200, json=engine.reply(body, "fine"))

    engine.answer = late
    chat = orjson.dumps({"messages": [USER]})
    connection[1].write(head(f"/sessions/{session}/v1/chat/completions", len(chat)) + chat + b"POST /")
    await asyncio.sleep(0.1)
    connection[1].write(b"sess")
    assert (await reply_of(connection))[0] == 200
    connection[1].write(b"ions HTTP/1.1\r\n\r\n")
    assert (await reply_of(connection))[0] == 200


async def test_a_body_in_time(connection: Connection) -> None:
    """A body may pause again and again, and take longer in all."""
    for _ in range(2):
        body = b'{"labels": {}}'
        connection[1].write(head("/sessions", len(body)))
        for byte in body[:4]:
            await asyncio.sleep(0.2)
            connection[1].write(bytes([byte]))
        connection[1].write(body[4:])
        assert (await reply_of(connection))[0] == 200


@pytest.mark.parametrize("begun", [b"", b'{"a"'], ids=["nothing", "half"])
@pytest.mark.parametrize("path", ["", "/samples", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_does_not_go_on(
    port: int, connection: Connection, engine: ScriptedEngine, path: str, begun: bytes
) -> None:
    """It is 400 after the pause, on every route that reads one, and the connection closes."""
    connection[1].write(head("/sessions"))
    session = json.loads((await reply_of(connection))[2])["session_id"]
    connection[1].write(head(f"/sessions/{session}{path}" if path else "/sessions", 100) + begun)
    status, lines, body = await reply_of(connection)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (400, "invalid_request")
    assert "for 0.5 s" in error["message"]
    assert b"connection: close" in lines
    assert await asyncio.wait_for(connection[0].read(), 5) == b""
    assert engine.requests == []


async def test_half_a_body_behind_a_request(connection: Connection) -> None:
    """A request that was sent before the answer to another has the same bound."""
    connection[1].write(head("/sessions") + head("/sessions", 100) + b"{")
    assert [(await reply_of(connection))[0] for _ in range(2)] == [200, 400]


async def test_a_body_that_waits_for_us(
    connection: Connection, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client is not blamed for a body that the server has not read yet."""
    connection[1].write(head("/sessions"))
    session = json.loads((await reply_of(connection))[2])["session_id"]
    read = store.read

    async def slow(*given: Any, **named: Any) -> Any:
        await asyncio.sleep(1.2)
        return await read(*given, **named)

    monkeypatch.setattr(store, "read", slow)
    body = b"x" * (4 * limits.MiB)
    connection[1].write(head(f"/sessions/{session}/tokenize", len(body)) + body)
    assert b" 200 OK" in await asyncio.wait_for(connection[0].readline(), 10)


LONG: Final = 16 * limits.MiB


@pytest.fixture
async def long_reply(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[asyncio.StreamReader]:
    """The reply to a request, longer than all buffers on its way; its head has been read."""
    monkeypatch.setattr(limits, "REPLY_STALL_S", 0.6)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(LONG // limits.MiB):
            yield b"x" * limits.MiB

    async def answer(_: Request) -> Response:
        return StreamingResponse(parts(), headers={"content-length": str(LONG)})

    async with served(Starlette(routes=[Route("/", answer)])) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: api\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        yield reader
        writer.close()


async def test_a_reply_that_is_read_slowly(long_reply: asyncio.StreamReader) -> None:
    """A client may pause again and again, and take longer in all."""
    for _ in range(6):
        await asyncio.sleep(0.4)
        await long_reply.readexactly(limits.MiB)
    assert len(await long_reply.readexactly(LONG - 6 * limits.MiB)) == LONG - 6 * limits.MiB


async def test_a_reply_that_is_not_read(long_reply: asyncio.StreamReader) -> None:
    """The connection is cut after the pause: what waited is gone with it."""
    await asyncio.sleep(1.5)
    with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
        await asyncio.wait_for(long_reply.readexactly(LONG), 5)


async def test_a_connection_that_breaks_has_no_timer() -> None:
    """Nothing waits for the rest of a body whose sender is gone."""
    transport = create_autospec(asyncio.Transport)
    transport.is_closing.return_value = False
    made = BoundedHttp(uvicorn.Config(Starlette(), log_config=None, access_log=False), ServerState(), {})
    made.connection_made(transport)
    made.data_received(head("/sessions", 100))
    timer = made.timeout_keep_alive_task
    assert timer is not None
    made.connection_lost(ConnectionResetError())
    assert timer.cancelled()
    await asyncio.gather(*made.tasks)


async def test_the_rest_of_a_refused_body(connection: Connection) -> None:
    """What comes after the answer is read for a while in all, and the next request may come at any time."""
    for length, rest in ((10, [b"345678", b"90"]), (10_000, [])):
        sent = head("/nowhere", length) + b"12"
        for piece in (sent[:20], sent[20:]):
            await asyncio.sleep(0.2)
            connection[1].write(piece)
        assert (await reply_of(connection))[0] == 404
        await asyncio.sleep(0.6)
        for piece in rest:
            await asyncio.sleep(0.2)
            connection[1].write(piece)
        await asyncio.sleep(0.6)
    async with asyncio.timeout(5):
        await drip(connection, b"x")


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


# Prompts


@pytest.mark.parametrize("beyond", [0, 1])
async def test_the_text_of_a_prompt(
    session: OpenSession,
    engine: ScriptedEngine,
    renderer: ChatRenderer,
    monkeypatch: pytest.MonkeyPatch,
    beyond: int,
) -> None:
    """A text of exactly the limit, in bytes, is rendered; one byte more is 413, and the engine is not asked.

    So it is with a later turn, whose text is what it adds.
    """
    asked = {"role": "user", "content": "¿Qué?" * 50}
    monkeypatch.setattr(limits, "PROMPT_TEXT_BYTES", len(renderer.render_text([asked]).encode()) - beyond)
    reply = await session.chat(asked)
    if beyond:
        await check(reply, 413, "prompt_too_long", "bytes of text", str(limits.PROMPT_TEXT_BYTES))
        assert engine.bodies == []
        assert await session.records() == []
        return
    assert reply.status_code == 200
    history = [asked, reply.json()["choices"][0]["message"]]
    assert (await session.chat(*history, USER)).status_code == 200
    # What the template writes between two turns is text of the second one.
    await check(await session.chat(*history, asked), 413, "prompt_too_long")


@pytest.mark.parametrize("beyond", [0, 1])
async def test_the_tokens_of_a_prompt(
    session: OpenSession, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """A whole prompt of exactly the limit goes to the engine; with one token more it is 413."""
    answer = (await session.chat(USER)).json()["choices"][0]["message"]
    await session.chat(USER, answer, USER)
    length = len(engine.bodies[-1]["input_ids"])
    monkeypatch.setattr(limits, "PROMPT_TOKENS", length - beyond)
    reply = await session.chat(USER, answer, USER)
    if beyond:
        await check(reply, 413, "prompt_too_long", f"{length} tokens")
        assert len(engine.bodies) == 2
    else:
        assert reply.status_code == 200


@pytest.mark.parametrize("text", ["x" * 1000, "x" * 1000 + "\U0001f600", "\u00e9" * 1000])
@pytest.mark.parametrize("is_escaped", [False, True])
async def test_all_bodies_of_a_process(
    session: OpenSession, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, text: str, is_escaped: bool
) -> None:
    """Bodies that are worked on count until their answers; one too many is 503, with a time to wait.

    They count as what they take in memory, if that is more than their bytes.
    """
    given = {"messages": [USER], "x": text}
    body = json.dumps(given, ensure_ascii=is_escaped).encode()
    size = max(len(body), ChatCompletion.parse(body).request.size)
    assert (ChatCompletion.parse(body).request.size > 4_000) == (len(text) > 1000)
    monkeypatch.setattr(limits, "BODIES_BYTES", 2 * size)
    come, go = asyncio.Event(), asyncio.Event()

    async def answer(sent: dict[str, Any]) -> httpx.Response:
        come.set()
        await go.wait()
        return httpx.Response(200, json=engine.reply(sent, "fine"))

    engine.answer = answer
    url = f"{session.url}/v1/chat/completions"
    one_more = json.dumps({**given, "x": text + "x" * size}, ensure_ascii=is_escaped).encode()
    first = asyncio.create_task(session.api.post(url, content=body))
    await come.wait()
    reply = await session.api.post(url, content=one_more)
    await check(reply, 503, "overloaded", str(2 * size))
    assert reply.headers["retry-after"] == str(limits.OVERLOADED_RETRY_AFTER_S)
    come.clear()
    second = asyncio.create_task(session.api.post(url, content=body))
    await come.wait()
    go.set()
    assert [(await task).status_code for task in (first, second)] == [200, 200]
    assert (await session.api.post(url, content=body)).status_code == 200


@pytest.mark.parametrize("beyond", [0, 1])
async def test_the_bytes_of_a_session(
    session: OpenSession,
    engine: ScriptedEngine,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    beyond: int,
) -> None:
    """A session whose turns take as much memory as they may is full before the engine is asked."""
    assert (await session.chat(USER)).status_code == 200
    state = fold(await store.read(session.url.rpartition("/")[2]))
    assert state is not None
    monkeypatch.setattr(limits, "SESSION_BYTES", state.size + 1 - beyond)
    reply = await session.chat(USER)
    if beyond:
        await check(reply, 409, "session_full", f"{state.size} bytes")
    assert (reply.status_code, len(engine.bodies)) == ((409, 1) if beyond else (200, 2))


@pytest.mark.parametrize("beyond", [0, 1])
async def test_the_tokens_of_a_view(
    session: OpenSession, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """Records of exactly the limit are shown; with one token more they are 400, which names what does it."""
    answer = (await session.chat(USER)).json()["choices"][0]["message"]
    await session.chat(USER, answer, USER)
    records = await session.records()
    tokens = sum(
        len(record["request"]["input_ids"])
        + len(record["response"]["choices"][0]["meta_info"]["output_token_logprobs"])
        for record in records
    )
    monkeypatch.setattr(limits, "VIEW_TOKENS", tokens - beyond)
    reply = await session.api.get(session.url)
    if beyond:
        await check(reply, 400, "invalid_request", "?view=events")
    else:
        assert reply.json()["records"] == records
    assert (await session.api.get(session.url, params={"view": "events"})).status_code == 200


# The process


async def test_what_leaves_the_cache_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed sessions and those without turns go before those that may go on, however old these are."""
    store = MemoryStore()
    for session_id in ("live", "sealed", "empty", "new"):
        await store.open(session_id, opened(labels={"x": "y" * 1000}))
    for session_id in ("live", "sealed", "new"):
        await store.append(session_id, 1, turn())
    await store.seal("sealed", sealed())
    meter = Telemetry()

    def held() -> int:
        return int(meter.cache_bytes.collect()[0].samples[0].value)

    all_three = Sessions(store, meter)
    for session_id in ("live", "sealed", "empty"):
        await all_three.load(session_id)
    cached = Sessions(store, meter, cache_bytes=held())
    for session_id in ("live", "sealed", "empty", "new"):
        await cached.load(session_id)
    read, reads = store.read, []

    async def noting(session_id: str, **range_: Any) -> Any:
        reads.append((session_id, range_["after"]))
        return await read(session_id, **range_)

    monkeypatch.setattr(store, "read", noting)
    for session_id in ("live", "new", "sealed"):
        await cached.load(session_id)
    assert reads == [("live", "1-0"), ("new", "1-0"), ("sealed", None)]


@pytest.mark.parametrize("is_sealed", [False, True])
async def test_a_session_that_is_gone(session: OpenSession, store: MemoryStore, is_sealed: bool) -> None:
    """It is not served from the cache: every route says that there is none."""
    session_id = session.url.rpartition("/")[2]
    assert (await session.chat(USER)).status_code == 200
    if is_sealed:
        await session.api.delete(session.url)
        assert (await session.api.get(session.url)).status_code == 404
    del store._streams[session_id]
    for reply in (
        await session.api.get(session.url),
        await session.chat(USER),
        await session.api.get(f"{session.url}/v1/models"),
    ):
        await check(reply, 404, "session_not_found")


async def test_the_cache_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that fill the cache to the byte stay; one byte more, and the least recent is read again."""
    store = MemoryStore()
    unused: Any = _Counted()
    reads: list[str] = []
    read = store.read

    async def counting(session_id: str, **range_: Any) -> Any:
        if range_["after"] is None:
            reads.append(session_id)
        return await read(session_id, **range_)

    async def bytes_of(*session_ids: str) -> int:
        meter = Telemetry()
        cached = Sessions(store, meter)
        for session_id in session_ids:
            await cached.load(session_id)
        return int(meter.cache_bytes.collect()[0].samples[0].value)

    monkeypatch.setattr(store, "read", counting)
    for session_id in ("a", "b"):
        await store.open(session_id, opened())
        await store.append(session_id, 1, turn())
    both = await bytes_of("a", "b")
    for bytes_, expected in ((both, ["a", "b"]), (both - 1, ["a", "b", "a"])):
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


WAYS = ["forward", "generate"]


async def ask(engine: SGLangEngine, way: str) -> None:
    """Sends a request to an engine that refuses everything, and takes the whole answer."""
    if way == "generate":
        with pytest.raises(EngineRefusal):
            await engine.generate("s", np.array([1], np.int32), {}, {})
        return
    async with engine.forward("s", "GET", "v1/models", "", {}, b"") as reply:
        async for _ in reply.body:
            pass


class SlowEngine:
    """Refuses requests when it is told to.

    Attributes:
        came: as many requests have come.
    """

    def __init__(self) -> None:
        self.came = 0
        self.go_on = asyncio.Event()
        self.app = Starlette(routes=[Route("/{path:path}", self._refuse, methods=["GET", "POST"])])

    async def until(self, came: int) -> None:
        while self.came < came:
            await asyncio.sleep(0.01)

    async def _refuse(self, _: Request) -> Response:
        self.came += 1
        await self.go_on.wait()
        return Response("{}", 400)


@asynccontextmanager
async def slow_engine() -> AsyncIterator[tuple[SlowEngine, SGLangEngine]]:
    """Such an engine, and the API's way to it."""
    slow = SlowEngine()
    async with served(slow.app) as port, asyncio.timeout(10):
        engine = SGLangEngine(f"http://127.0.0.1:{port}", timeout_s=30.0)
        yield slow, engine
        await engine.close()


@pytest.mark.parametrize("way", WAYS)
async def test_connections_to_the_engine(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As many requests as the limit are with the engine at the same time; one more waits for its turn."""
    monkeypatch.setattr(limits, "ENGINE_CONNECTIONS", 2)
    async with slow_engine() as (slow, engine):
        asked = [asyncio.create_task(ask(engine, way)) for _ in range(3)]
        await slow.until(2)
        await asyncio.sleep(0.3)
        assert slow.came == 2
        slow.go_on.set()
        await asyncio.gather(*asked)
        assert slow.came == 3


@pytest.mark.parametrize("way", WAYS)
async def test_no_connection_to_the_engine(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Waiting for a connection counts as the engine's time, for both ways to it."""
    monkeypatch.setattr(limits, "ENGINE_CONNECTIONS", 1)
    async with slow_engine() as (slow, engine):
        held = asyncio.create_task(ask(engine, way))
        await slow.until(1)
        engine._timeout_s = 0.2
        with pytest.raises(EngineTimeout, match="in time"):
            await ask(engine, way)
        assert slow.came == 1
        slow.go_on.set()
        await held


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("way", WAYS)
async def test_connecting_to_the_engine(monkeypatch: pytest.MonkeyPatch, way: str, is_late: bool) -> None:
    """A host that takes the connection within the time is asked; a slower one cannot be reached."""
    monkeypatch.setattr(limits, "ENGINE_CONNECT_S", 0.2 if is_late else 8.0)
    slow = SlowEngine()
    slow.go_on.set()
    with socket.socket() as full, socket.socket() as other:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        other.connect(full.getsockname())  # Linux lets the next one wait until it is taken
        port = full.getsockname()[1]
        engine = SGLangEngine(f"http://127.0.0.1:{port}", timeout_s=30.0)
        if is_late:
            with pytest.raises(EngineUnavailable, match="cannot be reached"):
                await ask(engine, way)
        else:
            asked = asyncio.create_task(ask(engine, way))
            await asyncio.sleep(0.3)
            assert not asked.done()
            full.listen(8)
            taken, _ = full.accept()
            server = await asyncio.start_server(_refusing, sock=full.dup())
            await asyncio.wait_for(asked, 7)
            server.close()
            taken.close()
        await engine.close()


async def _refusing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}")
    await writer.drain()
    writer.close()


@pytest.mark.parametrize(("pause_s", "connections"), [(0.0, 1), (0.6, 2)])
@pytest.mark.parametrize("way", WAYS)
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

    await ask(engine, way)
    await asyncio.sleep(pause_s)
    await ask(engine, way)
    assert made == connections
    await engine.close()
    listening.close()
    await asyncio.sleep(0.05)  # the handlers see the ends of their connections


@pytest.mark.parametrize("beyond", [0, 1])
async def test_text_that_is_rendered_inline(
    session: OpenSession, renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    """New messages and tools up to the limit are rendered on the loop; one byte more goes to a thread."""
    threads: list[threading.Thread] = []
    render = renderer.render

    def noting(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread())
        return render(*given, **more)

    monkeypatch.setattr(renderer, "render", noting)
    message = {"role": "user", "content": ""}
    message["content"] = "x" * (limits.WORK_INLINE_BYTES - len(orjson.dumps([[message], None])) + beyond)
    assert (await session.chat(message)).status_code == 200
    assert [thread is not threading.main_thread() for thread in threads] == [bool(beyond)]


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
    other = type(JOB)("sid", "1-0", uuid4().hex, 1, None, None)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(collector.collect(JOB, 30))
        await until_queued(worker, 2)
        with pytest.raises(QueueFull, match="2 collects"):
            await collector.collect(other, 5)
        waiting.cancel()


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
