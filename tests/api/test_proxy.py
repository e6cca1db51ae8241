"""The catch-all and the probes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.support.application import SETTINGS, application, served
from tests.support.scripted import ScriptedEngine, unreachable
from tokentape_contracts import limits
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer


async def test_forwards_to_the_engine(session: OpenSession, engine: ScriptedEngine) -> None:
    """Method, path, query and body reach the engine, unrecorded."""
    reply = await session.api.put(f"{session.url}/v1/a b/tokenize?x=1&y=%2F", content=b"body")
    assert reply.json() == {"path": "/v1/a b/tokenize", "body": "body"}
    sent = engine.requests[-1]
    assert (sent.method, sent.url.raw_path, sent.url.host) == (
        "PUT",
        b"/v1/a%20b/tokenize?x=1&y=%2F",
        "engine",
    )
    assert sent.headers["x-smg-routing-key"] == session.url.split("/")[-1]
    assert await session.records() == []


@pytest.mark.parametrize(
    ("path", "status"),
    [("%2e%2e/admin", 400), ("v1/..%2f..%2fadmin", 400), ("v1/%2e/x", 400), ("v1/x%0d%0aHost:%20evil", 404)],
)
async def test_cannot_leave_the_engine(
    session: OpenSession, engine: ScriptedEngine, path: str, status: int
) -> None:
    """A path that climbs out of the engine's root or smuggles a header is refused."""
    before = len(engine.requests)
    reply = await session.api.get(httpx.URL(f"http://api{session.url}/{path}"))
    assert reply.status_code == status
    assert len(engine.requests) == before


async def test_drops_the_engines_identity(session: OpenSession, engine: ScriptedEngine) -> None:
    """Server, Date and hop-by-hop headers of the engine are dropped: strict clients refuse them twice."""

    def answer(_: httpx.Request) -> httpx.Response:
        headers = {"Server": "s", "Date": "d", "Connection": "close", "Set-Cookie": "a=b", "X-Engine": "1"}
        return httpx.Response(418, content=b"teapot", headers=headers)

    engine.take_over = answer
    reply = await session.api.get(f"{session.url}/teapot")
    assert (reply.status_code, reply.content, reply.headers["x-engine"]) == (418, b"teapot", "1")
    assert {"server", "date", "connection", "set-cookie"}.isdisjoint(reply.headers)


async def test_health_and_ready(api: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """/health says that the process lives, whatever /ready says of Redis and the engine."""

    def down(_: httpx.Request) -> httpx.Response:
        raise unreachable()

    engine.take_over = down
    reply = await api.get("/ready")
    assert (reply.status_code, reply.json()["ready"]) == (503, False)
    assert "cannot be reached" in reply.json()["checks"]["engine"]
    assert (await api.get("/health")).json() == {"status": "ok"}
    engine.take_over = None
    assert (await api.get("/ready")).json() == {"ready": True, "checks": {"redis": "ok", "engine": "ok"}}


@pytest.mark.parametrize("path", ["", "samples/", "v1/chat/completions/", "/samples"])
async def test_a_slash_too_many_does_not_reach_the_engine(
    session: OpenSession, engine: ScriptedEngine, path: str
) -> None:
    """Our own paths with a slash too many are 404: the engine would answer and nobody would record."""
    before = len(engine.requests)
    for method in ("POST", "DELETE"):
        reply = await session.api.request(method, f"{session.url}/{path}", json={})
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "route_not_found")
    assert len(engine.requests) == before


async def test_no_redirects_of_our_own(api: httpx.AsyncClient, session: OpenSession) -> None:
    """A slash too many is no redirect, which would name the host that the client says we are."""
    for method, path in (("POST", "/sessions/"), ("GET", f"{session.url}/"), ("GET", "/health/")):
        reply = await api.request(method, path, headers={"Host": "evil.test"})
        assert (reply.status_code, "location" in reply.headers) == (404, False), path


@pytest.mark.parametrize("path", ["v1/models;x=1", "v1;/models", "v1/models%3Bx", ";", "v1/completions;a"])
async def test_path_parameters(session: OpenSession, engine: ScriptedEngine, path: str) -> None:
    """A router before the engine could cut them off, and see another path than we do."""
    reply = await session.api.post(f"{session.url}/{path}", json={})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_request")
    assert "parameter (;)" in reply.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("http://engine/v1/x", "/v1/x"),
        ("/v1/x", "/v1/x"),
        ("http://elsewhere/x", None),
        ("//elsewhere/x", None),
    ],
)
async def test_redirects_stay_within_the_session(
    session: OpenSession, engine: ScriptedEngine, target: str, expected: str | None
) -> None:
    """A redirect of the engine leads back through the session, or nowhere: not past the recorder."""
    engine.take_over = lambda _: httpx.Response(307, headers={"Location": target})
    reply = await session.api.get(f"{session.url}/v1/x/")
    assert reply.status_code == 307
    assert reply.headers.get("location") == (session.url + expected if expected else None)


# Answers that take long


@dataclass
class Slow:
    """An engine that answers every request so, and notices when it is given up.

    Attributes:
        begins: whether an answer begins at all.
        piece: what comes of it again and again, for ever.
        came, gone: a request has come; its connection was closed before the answer ended.
    """

    begins: bool
    piece: bytes
    came: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.came.set()
            if self.begins:
                writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
            while not reader.at_eof():
                writer.write(self.piece)
                await writer.drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass
        self.gone.set()
        writer.close()


SLOW: dict[str, Callable[[], Slow]] = {
    "silent": lambda: Slow(begins=False, piece=b""),
    "silent after its head": lambda: Slow(begins=True, piece=b""),
    "slow": lambda: Slow(begins=True, piece=b"x" * 100),
    "fast": lambda: Slow(begins=True, piece=b"x" * limits.MiB),
}
Open = Callable[[Slow, float], AbstractAsyncContextManager[str]]


@pytest.fixture
def slow_session(renderer: ChatRenderer) -> Open:
    """Opens a session behind the real HTTP server, before such an engine; given is the engine's time."""

    @asynccontextmanager
    async def open_session(engine: Slow, timeout_s: float) -> AsyncIterator[str]:
        upstream = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
        engine_url = f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}"
        app = application(
            renderer, MemoryStore(), {}, replace(SETTINGS, engine_url=engine_url), timeout_s=timeout_s
        )
        async with served(app) as port:
            async with httpx.AsyncClient(trust_env=False) as client:
                opened = await client.post(f"http://127.0.0.1:{port}/sessions")
            yield f"http://127.0.0.1:{port}/sessions/{opened.json()['session_id']}"
            upstream.close()

    return open_session


@pytest.mark.parametrize("name", SLOW)
async def test_a_client_that_goes_away_ends_the_engines_request(slow_session: Open, name: str) -> None:
    """At once, whether the answer has begun or not, and also if the client had stopped reading it."""
    engine = SLOW[name]()
    async with slow_session(engine, 60.0) as session, asyncio.timeout(10):
        url = httpx.URL(session)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"GET {url.path}/v1/models HTTP/1.1\r\nHost: api\r\n\r\n".encode())
        await engine.came.wait()
        if engine.begins:
            assert b" 200 OK" in await reader.readline()
        await asyncio.sleep(0.3)
        assert not engine.gone.is_set()
        writer.close()
        await engine.gone.wait()


@pytest.mark.parametrize("name", SLOW)
async def test_the_engines_time_is_a_total(slow_session: Open, name: str) -> None:
    """An answer that has not begun then is 504; one that has begun is cut off, however much still comes."""
    engine = SLOW[name]()
    async with (
        slow_session(engine, 0.5) as session,
        asyncio.timeout(10),
        httpx.AsyncClient(trust_env=False, timeout=None) as client,  # noqa: S113
    ):
        if engine.begins:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.get(f"{session}/v1/models")
        else:
            reply = await client.get(f"{session}/v1/models")
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "engine_timeout")
        await engine.gone.wait()
