"""A running API over an engine that plays a scripted agent's model."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.sdks.scene import Model, Stage, Wiretap
from tests.support.application import application, served, small_qwen, small_renderer
from tests.support.scripted import ScriptedEngine, network
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return small_renderer(small_qwen())


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the environment says, the SDKs use no proxy and report to nobody."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("LANGSMITH_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.setenv(name, "false")


@pytest.fixture
async def stage(renderer: ChatRenderer) -> AsyncIterator[Stage]:
    """The API, with a session that was opened without a wish."""
    engine, store = ScriptedEngine(renderer.tokenizer), MemoryStore()
    engine.answer = Model(engine, renderer)
    wiretap = Wiretap(application(renderer, store, network(engine.handle)))
    async with served(wiretap) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(trust_env=False) as client:
            session_id = (await client.post(f"{url}/sessions")).json()["session_id"]
        yield Stage(url, session_id, wiretap, engine, store, renderer)
