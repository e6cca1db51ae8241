"""`python -m tests.deploy.kubelet_engine`: the fault suite's engine, slower, in a pod.

Most answers take part of a second; a few take longer than most of what is done to the pods, so that a
generation is always on its way.
"""

import asyncio
import random
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.faults.engine import Engine

QUICK_S, SLOW_S = (0.1, 0.6), (5.0, 9.0)
SLOW = 0.05
"""So many of the answers are slow."""


def main() -> None:
    port, end, seed = map(int, sys.argv[1:])
    engine = Engine(end, seed, 0)
    draw = random.Random(seed)

    async def chat(request: Request) -> Response:
        await asyncio.sleep(draw.uniform(*(SLOW_S if draw.random() < SLOW else QUICK_S)))
        return await engine.chat(request)

    async def health(_: Request) -> Response:
        return Response()

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", health)])
    uvicorn.run(app, host="0.0.0.0", port=port, log_level="warning", access_log=False, timeout_keep_alive=60)  # noqa: S104


if __name__ == "__main__":
    main()
