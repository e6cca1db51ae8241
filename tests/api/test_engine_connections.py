"""Generations over real connections: what each way to break them is called, and what comes over them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from tokentape_api.engine import SGLangEngine
from tokentape_contracts.errors import EngineReplyInvalid, EngineTimeout, EngineUnavailable, TokentapeError

Peer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
REQUEST = {"model": "m", "messages": []}


@asynccontextmanager
async def engine_that(peer: Peer) -> AsyncIterator[SGLangEngine]:
    """An adapter on a server that treats every request so, after it has read its head."""

    serving = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        await peer(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    engine = SGLangEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=0.5)
    async with server:
        yield engine
        await engine.close()
        await asyncio.gather(*filter(None, serving), return_exceptions=True)


async def generate(engine: SGLangEngine, **headers: str) -> None:
    await engine.generate("s", np.arange(3, dtype=np.int32), REQUEST, headers)


async def _nothing(_: bytes, __: asyncio.StreamWriter) -> None: ...


async def _half_a_body(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices"')
    await writer.drain()


async def _no_http(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"220 smtp.example ESMTP\r\n\r\n")
    await writer.drain()


async def _silence(_: bytes, __: asyncio.StreamWriter) -> None:
    await asyncio.sleep(1.0)


async def _silence_in_the_body(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    await asyncio.sleep(1.0)


@pytest.mark.parametrize(
    ("peer", "error", "text"),
    [
        (_nothing, EngineUnavailable, "broke off"),
        (_half_a_body, EngineUnavailable, "broke off"),
        (_no_http, EngineReplyInvalid, "is not HTTP"),
        (_silence, EngineTimeout, "in time"),
        (_silence_in_the_body, EngineTimeout, "in time"),
    ],
)
async def test_a_broken_answer(peer: Peer, error: type[TokentapeError], text: str) -> None:
    """Every way in which an answer stays away has its error, and the request is not sent again."""
    requests = 0

    async def counted(head: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        requests += 1
        await peer(head, writer)

    async with engine_that(counted) as engine:
        with pytest.raises(error, match=text):
            await generate(engine)
    assert requests == 1


async def test_nobody_listens() -> None:
    """A refused connection is told from one that broke off: nothing was sent."""
    async with engine_that(_nothing) as engine:
        pass
    away = SGLangEngine(engine._base_url, timeout_s=0.5)
    with pytest.raises(EngineUnavailable, match="cannot be reached"):
        await generate(away)
    await away.close()


async def test_header_bytes_are_kept() -> None:
    """UTF-8 in a client's header goes through, which Starlette reads as Latin-1."""
    heads = []

    async def keep(head: bytes, _: asyncio.StreamWriter) -> None:
        heads.append(head)

    async with engine_that(keep) as engine:
        with pytest.raises(EngineUnavailable):
            await generate(engine, **{"x-run": "grün".encode().decode("latin-1")})
    assert b"x-run: " + "grün".encode() + b"\r\n" in heads[0]
