"""`python -m benchmarks.engine`: an engine that costs nothing, in a process of its own.

It answers SGLang's chat shape with `max_tokens` made-up tokens and, if asked, made-up routing: row `t` is the
same in every answer, as from an engine whose prefix cache never misses.
"""

import argparse
import asyncio
import sys
from typing import Any

import numpy as np
import orjson
import pybase64
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

EXPERTS = 128
MAX_TOKENS = 1 << 17


class Engine:
    """The answers.

    Args:
        latency_s: how long a generation takes.
        layers, topk: shape of a routing row.
    """

    def __init__(self, latency_s: float, layers: int, topk: int, end: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        self._latency_s = latency_s
        self._end = end
        self._rows = draw.integers(0, EXPERTS, (MAX_TOKENS, layers * topk), np.uint8)
        self._tokens = draw.integers(1000, 4000, MAX_TOKENS).tolist()

    async def chat(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        await asyncio.sleep(self._latency_s)
        prompt = len(body["input_ids"])
        count = body.get("max_tokens", 32)
        tokens = [*self._tokens[prompt : prompt + count - 1], self._end]
        meta = {
            "id": "bench",
            "prompt_tokens": prompt,
            "completion_tokens": count,
            "cached_tokens": max(0, prompt - 64),
            "weight_version": "1",
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        }
        if body.get("return_routed_experts"):
            start = body.get("routed_experts_start_len", 0)
            rows = self._rows[start : prompt + count - 1].astype("<i4")
            meta["routed_experts"] = pybase64.b64encode(rows.tobytes()).decode()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "ok", "tool_calls": None},
            "finish_reason": "stop",
            "meta_info": meta,
        }
        answer = {"id": "bench", "object": "chat.completion", "model": "bench", "choices": [choice]}
        return Response(orjson.dumps(answer), media_type="application/json")


async def _health(_: Request) -> Response:
    return Response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--end", type=int, required=True, help="id of the token that ends a turn")
    options = parser.parse_args()
    engine = Engine(options.latency_s, options.layers, options.topk, options.end)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", engine.chat, methods=["POST"]),
            Route("/health", _health),
        ]
    )
    uvicorn.run(
        app, host="127.0.0.1", port=options.port, log_level="warning", access_log=False, timeout_keep_alive=60
    )


if __name__ == "__main__":
    sys.exit(main())
