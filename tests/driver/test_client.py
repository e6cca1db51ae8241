"""`TokentapeClient` and `Session.delete`."""

import asyncio
import contextlib
import gzip
import logging
import re
import traceback
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.driver.fake import BASE_URL, FakeServer, hang, listening
from tokentape_contracts import limits
from tokentape_contracts.errors import (
    InvalidRequest,
    SessionNotFound,
    StoreUnavailable,
    TokentapeError,
    error_body,
)
from tokentape_contracts.http import OpenRequest
from tokentape_driver import RolloutSample, TokentapeClient, TransportError, UnexpectedReply


async def test_session_urls() -> None:
    """A session knows its URL and the one for OpenAI SDKs; the base URL may have a path and a slash."""
    server = FakeServer()
    async with TokentapeClient(f"{BASE_URL}/prefix/", transport=server.transport) as client:
        session = await client.open_session()
    assert session.id == "s1"
    assert session.url == f"{BASE_URL}/prefix/sessions/s1"
    assert session.openai_base_url == f"{BASE_URL}/prefix/sessions/s1/v1"
    assert server.calls == ["POST /prefix/sessions"]


@pytest.mark.parametrize(
    ("session_id", "path"),
    [
        ("a/b", "a%2Fb"),
        ("../x", "..%2Fx"),
        ("x?y#z", "x%3Fy%23z"),
        ("a%2fb", "a%252fb"),
        ("ä b", "%C3%A4%20b"),
        ("a\\b;c", "a%5Cb%3Bc"),
    ],
)
async def test_ids_are_quoted(session_id: str, path: str) -> None:
    """Whatever a server calls a session, every request of it goes below that name and to no other path."""
    server = FakeServer(open=httpx.Response(200, json={"session_id": session_id}))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        await session.delete()
        with contextlib.suppress(TokentapeError, UnexpectedReply):
            await session.collect_samples(RolloutSample())
    assert {request.url.raw_path.decode() for request in server.requests} == {
        "/sessions",
        f"/sessions/{path}",
        f"/sessions/{path}/samples",
    }
    assert session.openai_base_url == f"{BASE_URL}/sessions/{path}/v1"


@pytest.mark.parametrize("session_id", ["", ".", "..", None, 5, ["x"]])
async def test_ids_that_are_none(session_id: Any) -> None:
    """They are no answer to an opening."""
    server = FakeServer(open=httpx.Response(200, json={"session_id": session_id}))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(UnexpectedReply, match="names no session_id"):
            await client.open_session()


@pytest.mark.parametrize("stage", ["open", "samples", "delete"])
@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "deflate", "br", "zstd", "gzip, gzip"])
async def test_packed_replies(stage: str, encoding: str) -> None:
    """None is asked for, and none is unpacked: a few bytes could become gigabytes."""
    bomb = gzip.compress(b" " * 10_000_000)
    read = 0

    class Bomb(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            nonlocal read
            read += 1
            yield bomb

    packed = httpx.Response(200, headers={"Content-Encoding": encoding}, stream=Bomb())
    server = FakeServer(**{stage: packed})
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = None if stage == "open" else await client.open_session()

        async def ask() -> None:
            if session is None:
                await client.open_session()
            elif stage == "delete":
                await session.delete()
            else:
                await session.collect_samples(RolloutSample())

        with pytest.raises(UnexpectedReply, match="encoding is"):
            await ask()
    assert read == 0
    assert {request.headers["Accept-Encoding"] for request in server.requests} == {"identity"}


async def test_open_sends_what_was_given() -> None:
    """Opening sends the given fields and no others, in a body that the server accepts, with the token."""
    server = FakeServer()
    async with TokentapeClient(BASE_URL, token="t0p", transport=server.transport) as client:
        await client.open_session()
        await client.open_session(
            "linear",
            labels={"run": 7},
            pins={"temperature": 1.0},
            matcher="strict",
            altered_answer="keep",
        )
    assert server.requests[0].content == b"{}"
    opened = OpenRequest.parse(server.requests[1].content, matchers=("strict",))
    assert opened == OpenRequest(
        mode="linear",
        matcher="strict",
        altered_answer="keep",
        labels={"run": 7},
        pins={"temperature": 1.0},
    )
    assert server.requests[1].headers["Authorization"] == "Bearer t0p"


async def test_without_a_token_no_authorization() -> None:
    """Without a token no Authorization header is sent, and a token is in no repr."""
    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
    assert "Authorization" not in server.requests[0].headers
    async with TokentapeClient(BASE_URL, token="t0p", transport=server.transport) as client:
        assert "t0p" not in repr(client) + repr(session)


@pytest.mark.parametrize("stage", ["open", "collect", "delete"])
@pytest.mark.parametrize("refusal", [httpx.Response(502, text="<html>"), httpx.ConnectError("refused"), hang])
async def test_a_password_in_the_base_url_is_shown_nowhere(
    stage: str, refusal: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """User and password go to the server and to the agent, and into no error, note, log line or repr."""
    for name in ("DRIVER_OPEN_S", "DRIVER_DELETE_S"):
        monkeypatch.setattr(limits, name, 0.05)
    caplog.set_level(logging.DEBUG)
    server = FakeServer(**{"samples" if stage == "collect" else stage: refusal})
    shown = []
    async with TokentapeClient("http://me:s3%21cret@tape.test/x", transport=server.transport) as client:
        try:
            session = await client.open_session()
            assert session.openai_base_url == "http://me:s3%21cret@tape.test/x/sessions/s1/v1"
            shown.append(repr(session))
            await session.collect_samples(RolloutSample(), deadline_s=0.05)
            await session.delete()
        except TokentapeError as error:
            shown += traceback.format_exception(error)
        shown.append(repr(client))
    text = "".join(shown) + caplog.text
    assert "Error" in text or "Timeout" in text or "HTTP 502" in text
    assert "tape.test/x" in text
    assert not re.search("s3.*cret", text), text
    basic = httpx.BasicAuth("me", "s3!cret")._auth_header
    assert {request.headers["Authorization"] for request in server.requests} == {basic}


def test_a_base_url_that_is_none_is_not_quoted() -> None:
    """A password that is not percent-encoded breaks the URL, and the error quotes no part of it."""
    with pytest.raises(ValueError, match="percent-encoded") as caught:
        TokentapeClient("http://me:s3/cret@tape.test")
    assert "s3" not in "".join(traceback.format_exception(caught.value)).replace("s3/cret@tape.test", "")


@pytest.mark.parametrize("error", [InvalidRequest("labels must be an object"), StoreUnavailable("no Redis")])
async def test_open_raises_the_servers_error(error: TokentapeError) -> None:
    """A refusal to open arrives as the server's own class."""
    server = FakeServer(open=httpx.Response(500, json=error_body(error)))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(type(error), match=error.detail):
            await client.open_session()


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"session_id": ""}', b'{"session_id": 1}'])
async def test_open_without_a_session_id(body: bytes) -> None:
    """A 200 that names no session is `UnexpectedReply`."""
    server = FakeServer(open=httpx.Response(200, content=body))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(UnexpectedReply, match="names no session_id"):
            await client.open_session()


async def test_open_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening ends after its time limit, and says at which stage and host."""
    monkeypatch.setattr(limits, "DRIVER_OPEN_S", 0.05)
    server = FakeServer(open=hang)
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(TransportError, match=r"open: tape\.test:8080: no answer within 0\.05 s"):
            await client.open_session()


async def test_refused_connection() -> None:
    """A port on which nobody listens is `TransportError` with the cause."""
    async with TokentapeClient("http://127.0.0.1:1") as client:
        with pytest.raises(TransportError, match=r"open: 127\.0\.0\.1:1: ConnectError") as caught:
            await client.open_session()
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


async def test_delete_may_be_repeated() -> None:
    """DELETE may be sent any number of times; an unknown session is a warning only."""
    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        await session.delete()
        await session.delete()
    assert server.calls[1:] == ["DELETE /sessions/s1"] * 2


async def test_delete_of_an_unknown_session(caplog: pytest.LogCaptureFixture) -> None:
    """DELETE of an unknown session is a warning and no error."""
    server = FakeServer(delete=httpx.Response(404, json=error_body(SessionNotFound("no session s1"))))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        await (await client.open_session()).delete()
    [record] = [r for r in caplog.records if r.name == "tokentape.driver"]
    assert (record.levelno, "no session s1" in record.getMessage()) == (logging.WARNING, True)


async def test_delete_raises_other_failures() -> None:
    """An explicit DELETE that failed raises, for it is all that was asked for."""
    server = FakeServer(delete=httpx.Response(503, json=error_body(StoreUnavailable("no Redis"))))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        with pytest.raises(StoreUnavailable, match="no Redis"):
            await session.delete()


async def test_many_collects_leave_room_for_a_delete() -> None:
    """Connections are not limited: more waiting collects than httpx's default pool do not block a DELETE."""
    waiting = asyncio.Semaphore(0)

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting.release()
        await asyncio.Event().wait()

    async with listening(never) as (url, _), TokentapeClient(url) as client:
        session = await client.open_session()
        collects = [asyncio.create_task(session.collect_samples(RolloutSample())) for _ in range(120)]
        for _ in collects:
            await waiting.acquire()
        await session.delete()
        for collect in collects:
            collect.cancel()
        await asyncio.gather(*collects, return_exceptions=True)


async def test_labels_that_are_no_json() -> None:
    """What cannot be JSON is refused where it was given, and nothing is sent."""
    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        with pytest.raises(TypeError):
            await client.open_session(labels={"a": object()})
    assert server.calls == []
