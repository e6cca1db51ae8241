"""The catch-all and the probes."""

import httpx
import pytest

from tests.api.conftest import OpenSession
from tests.support.scripted import ScriptedEngine


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
        raise httpx.ConnectError("refused")

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
