"""The two processes' HTTP surfaces, in this process."""

from collections.abc import AsyncIterator

import fakeredis
import httpx
import pytest

from tests.support.application import application, client_of, small_qwen, small_renderer
from tests.support.scripted import network
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.telemetry import Telemetry
from tokentape_core.store import MemoryStore
from tokentape_core.text.render import ChatRenderer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return small_renderer(small_qwen())


@pytest.fixture
async def api(renderer: ChatRenderer) -> AsyncIterator[httpx.AsyncClient]:
    """An API process whose engine is away."""
    away = network(lambda _: httpx.Response(503))
    async with client_of(application(renderer, MemoryStore(), away)) as client:
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
