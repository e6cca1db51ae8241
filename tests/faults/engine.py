"""`python -m tests.faults.engine`: an SGLang server whose every answer can be known again.

No two answers have the same id, text or first tokens. Each carries a digest of the prompt tokens that the
engine got, which ends up in the recorded turn and in the client's hands.
"""

import argparse
import asyncio
import base64
import hashlib
import random
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support.scripted import replay_rows

LAYERS, CHOICES = 2, 2
"""Of the routing that it sends if it is asked."""
DIGEST = "prompt_digest"
_FIRST, _LAST = 1000, 4000
_BASE = _LAST - _FIRST


def digest_of(ids: Iterable[int]) -> str:
    """What the engine says of a prompt."""
    return hashlib.sha256(np.fromiter(ids, np.int32).tobytes()).hexdigest()[:24]


class Engine:
    """The answers.

    Args:
        end: the token that ends a turn.
        first: number of the first answer; an engine that takes another's place goes on behind it.
    """

    def __init__(self, end: int, seed: int, first: int) -> None:
        self._end = end
        self._draw = random.Random(seed + first)
        self._answers = first

    async def chat(self, request: Request) -> Response:
        body: dict[str, Any] = orjson.loads(await request.body())
        self._answers += 1
        number = self._answers
        await asyncio.sleep(self._draw.uniform(0.005, 0.06))
        more = [self._draw.randrange(_FIRST, _LAST) for _ in range(self._draw.randrange(2, 12))]
        tokens = [_FIRST + number // _BASE, _FIRST + number % _BASE, *more, self._end]
        prompt = body["input_ids"]
        meta = {
            "id": f"answer-{number}",
            "prompt_tokens": len(prompt),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_version": "1",
            "output_token_logprobs": [[-self._draw.random(), token, None] for token in tokens],
            DIGEST: digest_of(prompt),
        }
        if body.get("return_routed_experts"):
            start = body.get("routed_experts_start_len", 0)
            rows = replay_rows(start, len(prompt) + len(tokens) - 1, LAYERS, CHOICES)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": f"answer {number}", "tool_calls": None},
            "finish_reason": "stop",
            "meta_info": meta,
        }
        answer = {"id": f"answer-{number}", "object": "chat.completion", "model": "m", "choices": [choice]}
        return Response(orjson.dumps(answer), media_type="application/json")


async def _health(_: Request) -> Response:
    return Response()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--port", "--end", "--seed", "--first"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options.end, options.seed, options.first)
    app = Starlette(
        routes=[Route("/v1/chat/completions", engine.chat, methods=["POST"]), Route("/health", _health)]
    )
    # A busy machine may stop this process for longer than uvicorn's 5 s, and it would then drop connections
    # on which requests wait.
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=60,
    )


if __name__ == "__main__":
    sys.exit(main())
