"""The real HTTP server of an API process, and an engine that keeps every byte that it gets."""

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace

import httpx
import pytest
from hypothesis import settings as hypothesis_settings
from yarl import URL

from tests.support.application import SETTINGS, application, served, small_qwen, small_renderer
from tokentape_api.engine.port import Incoming
from tokentape_api.engine.transport import AiohttpNetwork
from tokentape_core.store import MemoryStore
from tokentape_core.text.tokenizer import Tokenizer

hypothesis_settings.register_profile("fuzz", deadline=None, max_examples=150)
FUZZ = hypothesis_settings.get_profile("fuzz")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_qwen()


class OneHost(AiohttpNetwork):
    """The network, of which every address that was asked for is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: set[tuple[str | None, int | None]] = set()

    def send(
        self, method: str, url: str, content: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Incoming]:
        asked = URL(url, encoded=True)
        self.hosts.add((asked.host, asked.port))
        return super().send(method, url, content, headers)


@dataclass
class RawEngine:
    """Answers 200 to anything and keeps what it read: one connection for each request."""

    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list, repr=False)
    port: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        body = b"" if head.startswith(b"HEAD ") else b"ok"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n" + body)
        await writer.drain()
        self.bodies.append(await reader.read())
        writer.close()


@dataclass
class Wire:
    """The API's port and a session, and what came out at the other end."""

    port: int
    session_id: str
    engine: RawEngine
    network: OneHost

    def took(self) -> list[bytes]:
        """The heads that the engine got since the last call."""
        heads, self.engine.heads = self.engine.heads, []
        return heads


@pytest.fixture(scope="module")
def wire(tokenizer: Tokenizer) -> Iterator[Wire]:
    """uvicorn with httptools, as `tokentape api` runs it, in front of a raw engine."""
    engine, network = RawEngine(), OneHost()
    ports: list[int] = []
    up, down = threading.Event(), threading.Event()

    async def main() -> None:
        upstream = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
        engine.port = upstream.sockets[0].getsockname()[1]
        settings = replace(SETTINGS, engine_url=f"http://127.0.0.1:{engine.port}")
        renderer = small_renderer(tokenizer)
        app = application(renderer, MemoryStore(), {"network": network}, settings, timeout_s=5.0)
        async with served(app) as port:
            ports.append(port)
            up.set()
            await asyncio.to_thread(down.wait)
        upstream.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(30)
    opened = httpx.post(f"http://127.0.0.1:{ports[0]}/sessions", trust_env=False).json()
    yield Wire(ports[0], opened["session_id"], engine, network)
    down.set()
    thread.join(10)
