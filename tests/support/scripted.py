"""An SGLang server that says what a test tells it to."""

import base64
import inspect
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import numpy as np
import uvicorn
from aiohttp.client_reqrep import ConnectionKey
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape_api.engine.port import Incoming
from tokentape_core.text.tokenizer import Tokenizer

Answer = Callable[[dict[str, Any]], httpx.Response | Awaitable[httpx.Response]]


def replay_rows(start: int, stop: int, layers: int, choices: int) -> NDArray[np.int32]:
    """int32[stop - start, layers, choices]: what a scripted model chooses at these positions."""
    position, layer, choice = np.ogrid[start:stop, :layers, :choices]
    return ((7 * position + 3 * layer + choice) % 128).astype(np.int32)


class HandledNetwork:
    """A network in which a function answers; what it raises is what the network does."""

    def __init__(self, handle: Callable[[httpx.Request], Any]) -> None:
        self._handle = handle

    @asynccontextmanager
    async def send(
        self, method: str, url: str, content: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Incoming]:
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        answer = self._handle(httpx.Request(method, url, content=content, headers=raw))
        response = await answer if inspect.isawaitable(answer) else answer
        yield Incoming(response.status_code, response.headers.raw, aiter(response.stream))

    async def close(self) -> None: ...


def unreachable() -> aiohttp.ClientConnectorError:
    """What aiohttp raises where nobody listens."""
    nowhere = ConnectionKey("engine", 80, False, True, None, None, None)
    return aiohttp.ClientConnectorError(nowhere, OSError(111, "refused"))


def network(handle: Callable[[httpx.Request], Any]) -> dict[str, Any]:
    """The arguments by which an engine adapter sends everything to this function."""
    return {"network": HandledNetwork(handle)}


@dataclass
class ScriptedEngine:
    """An SGLang server that says what a test tells it to, and remembers what it was asked."""

    tokenizer: Tokenizer
    requests: list[httpx.Request] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answer: Answer | None = None
    take_over: Callable[[httpx.Request], httpx.Response] | None = None
    texts: list[str] = field(default_factory=list)
    experts: tuple[int, int] | None = None
    """Layers and experts per token of the model, if it returns them when asked."""
    indexer: tuple[int, int] | None = None
    """Layers and entries per token of its sparse attention indexer, if it returns them when asked."""

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
            **self._replay(body, len(body["input_ids"]) + len(ids) - 1),
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

    def _replay(self, body: dict[str, Any], stop: int) -> dict[str, Any]:
        meta: dict[str, Any] = {}
        if self.experts and body.get("return_routed_experts"):
            rows = replay_rows(body.get("routed_experts_start_len", 0), stop, *self.experts)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        if self.indexer and body.get("return_indexer_topk"):
            rows = replay_rows(0, stop, *self.indexer)
            meta["indexer_topk"] = base64.b64encode(rows.tobytes()).decode()
            meta["indexer_topk_num_layers"] = self.indexer[0]
        return meta

    @contextmanager
    def serve(self) -> Iterator[str]:
        """Listens on loopback, in a thread of its own; yields the base URL."""

        async def endpoint(request: Request) -> Response:
            sent = httpx.Request(
                request.method, str(request.url), headers=request.headers.raw, content=await request.body()
            )
            reply = await self.handle(sent)
            return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))

        methods = ["GET", "POST", "PUT", "DELETE"]
        app = Starlette(routes=[Route("/{path:path}", endpoint, methods=methods)])
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", access_log=False)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the scripted engine did not start")
            threading.Event().wait(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)
