"""The real API application in this process, over an engine of the test's and a store in memory."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import fakeredis
import httpx
import uvicorn
from starlette.applications import Starlette

from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.http.server import BoundedHttp, BoundedServer
from tokentape_api.settings import ApiSettings
from tokentape_core.store import MemoryStore
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

SETTINGS = ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3")


def small_qwen() -> Tokenizer:
    """The small Qwen vocabulary with an append-only template."""
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    return Tokenizer(hf)


def small_renderer(tokenizer: Tokenizer) -> ChatRenderer:
    """The renderer that `SETTINGS` names, on this tokenizer."""
    return ChatRenderer(tokenizer, get_family(SETTINGS.family))


def application(
    renderer: ChatRenderer,
    store: MemoryStore,
    network: Mapping[str, Any],
    settings: ApiSettings = SETTINGS,
    timeout_s: float = 1.0,
) -> Starlette:
    """The application; its workers are nobody.

    Args:
        network: how the engine is reached, as from `scripted.network`.
        timeout_s: the engine's.
    """
    server = fakeredis.FakeServer()
    queue = [fakeredis.FakeAsyncRedis(server=server) for _ in range(2)]
    return build_app(
        settings,
        store=store,
        engine=SGLangEngine(settings.engine_url, timeout_s=timeout_s, **network),
        renderer=renderer,
        collector=Collector(queue[0], queue[1], queue[0]),
    )


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the running application."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client


@asynccontextmanager
async def served(app: Starlette, keep_alive_s: int = 60) -> AsyncIterator[int]:
    """The application behind the HTTP server of an API process; its port."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=BoundedHttp,
        ws="none",
        log_config=None,
        access_log=False,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=5,
    )
    server = BoundedServer(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task
