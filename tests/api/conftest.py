"""An API process in this process: the real application over a scripted engine and a store in memory."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import fakeredis
import httpx
import pytest

from tests.support.scripted import ScriptedEngine, network
from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.settings import ApiSettings
from tokentape_core.store import MemoryStore
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The small Qwen vocabulary with an append-only template."""
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    return Tokenizer(hf)


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return ChatRenderer(tokenizer, get_family("qwen3"))


@pytest.fixture
def settings() -> ApiSettings:
    """A module that wants others has a fixture of this name."""
    return ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3")


@pytest.fixture
async def api(
    settings: ApiSettings, engine: ScriptedEngine, store: MemoryStore, renderer: ChatRenderer
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application."""
    server = fakeredis.FakeServer()
    queue = [fakeredis.FakeAsyncRedis(server=server) for _ in range(2)]
    upstream = SGLangEngine("http://engine", timeout_s=1.0, **network(engine.handle))
    app = build_app(
        settings,
        store=store,
        engine=upstream,
        renderer=renderer,
        collector=Collector(queue[0], queue[1], queue[0]),
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client


@dataclass
class OpenSession:
    """A session of the application under test."""

    api: httpx.AsyncClient
    url: str

    async def chat(self, *messages: dict[str, Any], **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": list(messages), **fields}
        return await self.api.post(f"{self.url}/v1/chat/completions", json=body)

    async def records(self) -> list[dict[str, Any]]:
        return (await self.api.get(self.url)).json()["records"]


@pytest.fixture
async def session(api: httpx.AsyncClient) -> OpenSession:
    reply = await api.post("/sessions")
    return OpenSession(api, f"/sessions/{reply.json()['session_id']}")
