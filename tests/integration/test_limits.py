"""Bounds that only a whole process shows."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes import Fleet
from tests.support.scripted import ScriptedEngine
from tokentape_cli.processes import free_port
from tokentape_contracts import limits

API = """
from tokentape_contracts import limits
limits.DRAIN_S = 1 - int(limits.ENGINE_TIMEOUT_S)
limits.API_KEEP_ALIVE_S = 2
limits.REQUEST_HEAD_S = limits.REQUEST_BODY_S = 1
from tokentape_cli.main import main
main()
"""
"""An API process with bounds that a test can wait for."""
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}

pytestmark = pytest.mark.slow


@asynccontextmanager
async def api(
    system: Fleet, client: httpx.AsyncClient
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Such a process, and its port."""
    program: Path = system.directory / "api.py"
    program.write_text(API)
    port = free_port()
    arguments = [
        *("api", "--port", str(port), "--engine-url", system.engine_url, "--family", system.family),
        *("--tokenizer", str(system.tokenizer), "--redis-url", system.redis_url),
    ]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(program), *arguments, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    await client.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.05)
        yield process, port
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_idle_connections(system: Fleet, client: httpx.AsyncClient) -> None:
    """A connection can be used again within the idle time, and is closed after it."""
    async with api(system, client) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(b"GET /health HTTP/1.1\r\nHost: api\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n")
            await reader.readuntil(b'{"status":"ok"}')
            await asyncio.sleep(0.4)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"POST /sessions HT", b"HTTP/1.1 400 Bad Request"),
        (b"POST /sessions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{", b"HTTP/1.1 400 Bad Request"),
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_requests_that_do_not_end(
    system: Fleet, client: httpx.AsyncClient, sent: bytes, answer: bytes
) -> None:
    """A connection is closed that sends nothing, or not all of a request."""
    async with api(system, client) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n")[0] == answer
        writer.close()


@pytest.mark.parametrize(("takes_s", "answered"), [(0.4, True), (8.0, False)])
async def test_draining(
    system: Fleet, engine: ScriptedEngine, client: httpx.AsyncClient, takes_s: float, answered: bool
) -> None:
    """After SIGTERM a request that ends within the time is answered and recorded; a longer one is cut off."""
    async with api(system, client) as (process, port):
        url = f"http://127.0.0.1:{port}"
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def answer(body: dict[str, Any]) -> httpx.Response:
            loop.call_soon_threadsafe(asked.set)
            await asyncio.sleep(takes_s)
            return httpx.Response(200, json=engine.reply(body, "fine"))

        engine.answer = answer
        session = (await client.post(f"{url}/sessions")).json()["session_id"]
        chat = asyncio.create_task(client.post(f"{url}/sessions/{session}/v1/chat/completions", json=CHAT))
        await asked.wait()
        process.send_signal(signal.SIGTERM)
        if answered:
            assert (await chat).status_code == 200
        else:
            [outcome] = await asyncio.gather(chat, return_exceptions=True)
            assert isinstance(outcome, httpx.TransportError) or outcome.status_code >= 500
        assert await asyncio.wait_for(process.wait(), 5) == 0
    _, other = system.api()
    shown = (await client.get(f"{other}/sessions/{session}")).json()
    assert len(shown["records"]) == answered


async def test_a_request_on_its_way(system: Fleet, client: httpx.AsyncClient) -> None:
    """An idle connection answers a request that comes soon after SIGTERM and is closed; another one later."""
    async with api(system, client) as (process, port):
        used, unused = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        await asyncio.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(0.3)
        used[1].write(b"GET /health HTTP/1.1\r\nHost: api\r\n\r\n")
        answer = await asyncio.wait_for(used[0].read(), 5)
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in answer.lower()
        assert await asyncio.wait_for(unused[0].read(), 5) == b""
        assert asyncio.get_running_loop().time() - began >= limits.LAST_REQUEST_S
        for _, writer in (used, unused):
            writer.close()
        assert await asyncio.wait_for(process.wait(), 5) == 0
