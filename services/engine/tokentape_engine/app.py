"""The HTTP application: routes, errors, and the hand-over to the generator's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tokentape_engine.generate import Generator, QueueFullError
from tokentape_engine.model import TinyModel
from tokentape_engine.reply import chat_reply, error_reply, generate_reply, update_reply
from tokentape_engine.request import (
    BadRequestError,
    GenerationRequest,
    read_chat,
    read_generate,
    read_json,
    read_update,
)
from tokentape_engine.sequence import Completion
from tokentape_engine.weights import UnknownVersionError

MODEL_NAME = "tokentape-reference"


def build_app(model: TinyModel, *, model_name: str = MODEL_NAME, seed: int = 0) -> Starlette:
    """The application for one model. Its generator thread starts and ends with the application's lifespan.

    `seed` starts the draws of requests that bring no seed of their own. `/update_weights` changes `model`, in
    memory only.
    """
    state: dict[str, Generator] = {}

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        state["generator"] = Generator(
            model.network, model.tokenizer, model.eos_token_ids, model.context_length, seed
        )
        try:
            yield
        finally:
            state["generator"].close()

    async def complete(request: GenerationRequest) -> Completion:
        future = state["generator"].submit(request.prompt, request.sampling, request.experts_from)
        return await asyncio.wrap_future(future)

    async def chat(http: Request) -> Response:
        request = read_chat(read_json(await http.body()), model)
        return _json(chat_reply(request, await complete(request), model.tokenizer, model_name))

    async def generate(http: Request) -> Response:
        request = read_generate(read_json(await http.body()), model)
        return _json(generate_reply(request, await complete(request), model.tokenizer))

    async def update_weights(http: Request) -> Response:
        change = read_update(read_json(await http.body()))
        return _json(update_reply(await asyncio.wrap_future(state["generator"].update(change))))

    async def models(_: Request) -> Response:
        card = {
            "id": model_name,
            "object": "model",
            "created": 0,
            "owned_by": "tokentape",
            "max_model_len": model.context_length,
        }
        return _json({"object": "list", "data": [card]})

    async def health(_: Request) -> Response:
        return Response()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/update_weights", update_weights, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        exception_handlers={
            BadRequestError: _bad_request,
            UnknownVersionError: _bad_request,
            QueueFullError: _queue_full,
            HTTPException: _http_error,
            Exception: _internal_error,
        },
        lifespan=lifespan,
    )


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")


async def _bad_request(_: Request, error: Exception) -> Response:
    return _json(error_reply(400, "BadRequestError", str(error)), 400)


async def _queue_full(_: Request, error: Exception) -> Response:
    return _json(error_reply(503, "ServiceUnavailable", str(error)), 503)


async def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return _json(error_reply(status, "HTTPException", detail), status)


async def _internal_error(_: Request, error: Exception) -> Response:
    return _json(error_reply(500, "InternalServerError", f"{type(error).__name__}: {error}"), 500)
