"""An API process in this process: the real application over a scripted engine and a store in memory."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from tests.support.application import SETTINGS, application, client_of, small_qwen, small_renderer
from tests.support.scripted import ScriptedEngine, network
from tokentape_api.settings import ApiSettings
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return small_qwen()


@pytest.fixture
def engine(tokenizer: Tokenizer) -> ScriptedEngine:
    return ScriptedEngine(tokenizer)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def renderer(tokenizer: Tokenizer) -> ChatRenderer:
    return small_renderer(tokenizer)


@pytest.fixture
def settings() -> ApiSettings:
    """A module that wants others has a fixture of this name."""
    return SETTINGS


@pytest.fixture
def app(
    settings: ApiSettings, engine: ScriptedEngine, store: MemoryStore, renderer: ChatRenderer
) -> Starlette:
    """The application under test."""
    return application(renderer, store, network(engine.handle), settings)


@pytest.fixture
async def api(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application."""
    async with client_of(app) as client:
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
