"""An API process in this process: the real application over a scripted engine and a store in memory."""

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import fakeredis
import httpx
import pytest
from arq.connections import ArqRedis

from tokentape_api.app import build_app
from tokentape_api.collect import Collector
from tokentape_api.engine import SGLangEngine
from tokentape_api.settings import ApiSettings
from tokentape_contracts import jobs
from tokentape_core.store import MemoryStore
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

Answer = Callable[[dict[str, Any]], httpx.Response | Awaitable[httpx.Response]]


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The small Qwen vocabulary with an append-only template."""
    hf = small_tokenizer()
    hf.chat_template = chat_template("qwen3_training")
    return Tokenizer(hf)


@dataclass
class ScriptedEngine:
    """An SGLang server that says what a test tells it to, and remembers what it was asked."""

    tokenizer: Tokenizer
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answer: Answer | None = None
    take_over: Callable[[httpx.Request], httpx.Response] | None = None
    texts: list[str] = field(default_factory=list)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.take_over is not None:
            return self.take_over(request)
        if request.url.path == "/health":
            return httpx.Response(200)
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(200, json={"path": request.url.path, "body": request.content.decode()})
        body = json.loads(request.content)
        self.bodies.append(body)
        if self.answer is not None:
            answer = self.answer(body)
            return await answer if inspect.isawaitable(answer) else answer
        return httpx.Response(200, json=self.reply(body, self.texts.pop(0) if self.texts else "fine"))

    def reply(self, body: dict[str, Any], text: str, **changes: Any) -> dict[str, Any]:
        """A good answer of this text; `changes` replace parts of the message, the choice or `meta_info`."""
        ids = self.tokenizer.encode(text + "<|im_end|>")
        message = {"role": "assistant", "content": text, "tool_calls": None, **changes.get("message", {})}
        meta = {
            "id": "r",
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "1",
            "output_token_logprobs": [[-0.5 - i / 100, token, None] for i, token in enumerate(ids)],
            **changes.get("meta", {}),
        }
        choice = {"index": 0, "message": message, "finish_reason": "stop", "meta_info": meta}
        return {
            "id": f"chatcmpl-{len(self.bodies)}",
            "object": "chat.completion",
            "created": 1,
            "model": "scripted",
            "choices": [{**choice, **changes.get("choice", {})}],
            "usage": {"prompt_tokens": len(body["input_ids"]), "completion_tokens": len(ids)},
            **changes.get("answer", {}),
        }


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
async def api(
    engine: ScriptedEngine, store: MemoryStore, renderer: ChatRenderer
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application."""
    settings = ApiSettings(engine_url="http://engine", tokenizer="-", redis_url="-", family="qwen3")
    server = fakeredis.FakeServer()
    queue = [
        ArqRedis(
            fakeredis.FakeAsyncRedis(server=server).connection_pool,
            job_serializer=jobs.serialize,
            job_deserializer=jobs.deserialize,
        )
        for _ in range(2)
    ]
    upstream = SGLangEngine("http://engine", timeout_s=1.0, transport=httpx.MockTransport(engine.handle))
    app = build_app(
        settings, store=store, engine=upstream, renderer=renderer, collector=Collector(queue[0], queue[1])
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://api") as client,
    ):
        yield client
    await upstream.close()


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
