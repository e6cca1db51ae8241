"""The two processes' HTTP surfaces, in this process."""

from collections.abc import AsyncIterator

import fakeredis
import httpx
import pytest

from tests.support.scripted import network
from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.settings import ApiSettings
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.telemetry import Telemetry
from tokentape_core.store import MemoryStore
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    return ChatRenderer(Tokenizer(hf), get_family("qwen3"))


@pytest.fixture
async def api(renderer: ChatRenderer) -> AsyncIterator[httpx.AsyncClient]:
    """An API process whose engine is away."""
    server = fakeredis.FakeServer()
    queue = [fakeredis.FakeAsyncRedis(server=server) for _ in range(2)]
    away = network(lambda _: httpx.Response(503))
    app = build_app(
        ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3"),
        store=MemoryStore(),
        engine=SGLangEngine("http://engine", timeout_s=1.0, **away),
        renderer=renderer,
        collector=Collector(queue[0], queue[1], queue[0]),
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client


@pytest.fixture
async def assembler() -> AsyncIterator[httpx.AsyncClient]:
    """A worker process's endpoint, without a child that could run a job."""
    endpoint = Endpoint(Telemetry(), [fakeredis.FakeAsyncRedis()], lambda: 0, "127.0.0.1", 0)
    async with (
        endpoint,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}", trust_env=False) as client,
    ):
        yield client
