"""Bounds of the driver: what is allowed at each, and what one more gives."""

import asyncio
from typing import Any

import httpx
import orjson
import pytest

from tests.driver.fake import BASE_URL, FakeServer, hang, payload, reply_of
from tokentape_contracts import limits
from tokentape_driver import (
    CollectTimeout,
    RolloutSample,
    TokentapeClient,
    TransportError,
    UnexpectedReply,
    rollout,
)
from tokentape_driver.session import samples_body


def slow(takes_s: float, reply: httpx.Response) -> Any:
    async def answer(_: httpx.Request) -> httpx.Response:
        await asyncio.sleep(takes_s)
        return reply

    return answer


async def test_opening(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer within the time is a session; a later one is `TransportError`."""
    monkeypatch.setattr(limits, "DRIVER_OPEN_S", 0.3)
    reply = httpx.Response(200, json={"session_id": "s1"})
    server = FakeServer(open=slow(0.05, reply))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        assert (await client.open_session()).id == "s1"
        server.open = slow(5.0, reply)
        with pytest.raises(TransportError, match=r"no answer within 0\.3 s"):
            await client.open_session()


async def test_collecting() -> None:
    """A reply within the deadline is delivered; a later one is `CollectTimeout`."""
    server = FakeServer(samples=slow(0.05, reply_of(payload())))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        assert len((await session.collect_samples(RolloutSample(), deadline_s=2.0)).samples) == 1
        server.samples = hang
        with pytest.raises(CollectTimeout, match=r"deadline of 0\.1 s"):
            await session.collect_samples(RolloutSample(), deadline_s=0.1)


async def test_deleting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer within the time is a deleted session; a later one is `TransportError`."""
    monkeypatch.setattr(limits, "DRIVER_DELETE_S", 0.3)
    server = FakeServer(delete=slow(0.05, httpx.Response(204)))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        await session.delete()
        server.delete = slow(5.0, httpx.Response(204))
        with pytest.raises(TransportError, match=r"delete: .*no answer within 0\.3 s"):
            await session.delete()


@pytest.mark.parametrize(
    ("deadline_s", "for_server"), [(10.0, 9.0), (100.0, 90.0), (101.0, 91.0), (3600.0, 3590.0)]
)
def test_the_servers_head_start(deadline_s: float, for_server: float) -> None:
    """The server gets a tenth less than the driver, up to the longest head start and not more."""
    assert limits.DRIVER_HEAD_START * 100 == limits.DRIVER_HEAD_START_MAX_S == 10
    assert orjson.loads(samples_body(None, deadline_s))["deadline_s"] == pytest.approx(for_server)


@pytest.mark.parametrize(("pause_s", "connections"), [(0.0, 1), (0.5, 2)])
async def test_idle_connections(monkeypatch: pytest.MonkeyPatch, pause_s: float, connections: int) -> None:
    """A connection is used again within the idle time, and a new one is made after it."""
    monkeypatch.setattr(limits, "DRIVER_KEEP_ALIVE_S", 0.2)
    made = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        body = b'{"session_id": "s1"}'
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.readexactly(2)
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with TokentapeClient(f"http://{host}:{port}") as client:
        await client.open_session()
        await asyncio.sleep(pause_s)
        await client.open_session()
    assert made == connections
    server.close()
    await asyncio.sleep(0.1)  # the handlers see the ends of their connections


@pytest.mark.parametrize("beyond", [0, 1])
async def test_a_quoted_body(beyond: int) -> None:
    """An error quotes a foreign body up to the limit; what is beyond is left out."""
    text = "x" * limits.DRIVER_QUOTED_BODY_CHARS + "y" * beyond
    server = FakeServer(samples=httpx.Response(500, text=text))
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        session = await client.open_session()
        with pytest.raises(UnexpectedReply) as caught:
            await session.collect_samples(RolloutSample())
    assert caught.value.text == "x" * limits.DRIVER_QUOTED_BODY_CHARS


@pytest.mark.parametrize("beyond", [0, 1])
async def test_an_agents_error(beyond: int) -> None:
    """The agent's exception is in the metadata up to the limit; what is beyond is left out."""
    text = "x" * (limits.DRIVER_AGENT_ERROR_CHARS - len("ValueError: ")) + "y" * beyond

    async def agent(base_url: str, sample: Any) -> None:
        raise ValueError(text)

    server = FakeServer()
    async with TokentapeClient(BASE_URL, transport=server.transport) as client:
        result: Any = await rollout(agent, RolloutSample(), client=client)
    assert result.metadata["agent_error"] == "ValueError: " + text.rstrip("y")
    assert len(result.metadata["agent_error"]) == limits.DRIVER_AGENT_ERROR_CHARS
