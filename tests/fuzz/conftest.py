"""The real HTTP server of an API process, and an engine that keeps every byte that it gets."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import fakeredis
import httpx
import pytest
import uvicorn
from hypothesis import settings as hypothesis_settings
from starlette.applications import Starlette

from tests.support.scripted import ScriptedEngine, network
from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.protocol import BoundedHttp
from tokentape_api.settings import ApiSettings
from tokentape_core.store import MemoryStore
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

hypothesis_settings.register_profile("fuzz", deadline=None, max_examples=150)
FUZZ = hypothesis_settings.get_profile("fuzz")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The small Qwen vocabulary with an append-only template."""
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    return Tokenizer(hf)


@dataclass
class Application:
    """An API over a store in memory; its workers are nobody."""

    app: Starlette
    store: MemoryStore
    upstream: SGLangEngine


def application(
    tokenizer: Tokenizer, engine_url: str, network: Mapping[str, Any], **settings: Any
) -> Application:
    """The application whose engine is reached over this network."""
    server = fakeredis.FakeServer()
    queues = [fakeredis.FakeAsyncRedis(server=server) for _ in range(2)]
    store = MemoryStore()
    upstream = SGLangEngine(engine_url, timeout_s=5.0, **network)
    app = build_app(
        ApiSettings(engine_url=engine_url, tokenizer="-", redis_url="-", family="qwen3", **settings),
        store=store,
        engine=upstream,
        renderer=ChatRenderer(tokenizer, get_family("qwen3")),
        collector=Collector(queues[0], queues[1], queues[0]),
    )
    return Application(app, store, upstream)


@asynccontextmanager
async def client_of(
    tokenizer: Tokenizer, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any, Any]]:
    """A client of an application within this event loop, its scripted engine and its store."""
    engine = ScriptedEngine(tokenizer)
    made = application(tokenizer, "http://engine", network(engine.handle), **settings)
    transport = httpx.ASGITransport(made.app, raise_app_exceptions=False)
    async with (
        made.app.router.lifespan_context(made.app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client, engine, made.store


class OneHost(httpx.AsyncHTTPTransport):
    """The network, of which every address that was asked for is kept."""

    def __init__(self) -> None:
        super().__init__(trust_env=False)
        self.hosts: set[tuple[str, int | None]] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.hosts.add((request.url.host, request.url.port))
        return await super().handle_async_request(request)


@dataclass
class RawEngine:
    """Answers 200 to anything and keeps what it read: one connection for each request."""

    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list, repr=False)
    port: int = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        self.bodies.append(await reader.read())
        writer.close()


@dataclass
class Wire:
    """The API's port and a session, and what came out at the other end."""

    port: int
    session_id: str
    engine: RawEngine
    transport: OneHost

    def took(self) -> list[bytes]:
        """The heads that the engine got since the last call."""
        heads, self.engine.heads = self.engine.heads, []
        return heads


@pytest.fixture(scope="module")
def wire(tokenizer: Tokenizer) -> Iterator[Wire]:
    """uvicorn with httptools, as `tokentape api` runs it, in front of a raw engine."""
    engine, transport = RawEngine(), OneHost()
    made: list[uvicorn.Server] = []
    up = threading.Event()

    async def main() -> None:
        upstream = await asyncio.start_server(engine.answer, "127.0.0.1", 0)
        engine.port = upstream.sockets[0].getsockname()[1]
        made_app = application(tokenizer, f"http://127.0.0.1:{engine.port}", {"transport": transport})
        config = uvicorn.Config(
            made_app.app,
            host="127.0.0.1",
            port=0,
            http=BoundedHttp,
            ws="none",
            log_config=None,
            access_log=False,
        )
        server = uvicorn.Server(config)
        made.append(server)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        up.set()
        await task
        upstream.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert up.wait(30)
    port = made[0].servers[0].sockets[0].getsockname()[1]
    opened = httpx.post(f"http://127.0.0.1:{port}/sessions", trust_env=False).json()
    yield Wire(port, opened["session_id"], engine, transport)
    made[0].should_exit = True
    thread.join(10)
