"""`python -m benchmarks.bare`: what the packages cost by themselves.

The server, framework, HTTP client and Redis client of the API, with the calls and about the bytes of a chat
turn, and nothing of what Tokentape is for: no check, no position, no template, no tokens, no metrics, no log.
Whatever the API costs beyond this is its own.
"""

import argparse
import sys
import uuid

import aiohttp
import orjson
import redis.asyncio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

EVENT_BYTES = 1500
TOKENS_PER_TURN = 50
STREAM = "bare"


class Bare:
    """The two routes that the benchmarks use, of an API that keeps nothing."""

    def __init__(self, engine_url: str, redis_url: str) -> None:
        self._engine_url = engine_url
        self._redis = redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(redis_url))
        self._http: aiohttp.ClientSession | None = None

    async def open_session(self, _: Request) -> Response:
        return _json({"session_id": uuid.uuid4().hex})

    async def chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        await self._redis.xrange(STREAM, min="(1-0")
        turns = (len(body["messages"]) + 1) // 2
        body |= {"logprobs": True, "return_meta_info": True, "input_ids": [1000] * TOKENS_PER_TURN * turns}
        self._http = self._http or aiohttp.ClientSession()
        headers = {"content-type": "application/json"}
        url = f"{self._engine_url}/v1/chat/completions"
        async with self._http.post(url, data=orjson.dumps(body), headers=headers) as response:
            answer = orjson.loads(await response.read())
        pipe = self._redis.pipeline(transaction=False)
        pipe.xadd(STREAM, {"event": b"x" * EVENT_BYTES}, maxlen=1)
        pipe.expire(STREAM, 1000)
        pipe.expire(f"{STREAM}:blobs", 1000)
        await pipe.execute()
        return _json(answer)


def _json(content: object) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--redis-url", required=True)
    options = parser.parse_args()
    bare = Bare(options.engine_url, options.redis_url)
    app = Starlette(
        routes=[
            Route("/health", lambda _: Response()),
            Route("/sessions", bare.open_session, methods=["POST"]),
            Route("/sessions/{sid}/v1/chat/completions", bare.chat, methods=["POST"]),
        ]
    )
    uvicorn.run(app, port=options.port, loop="uvloop", http="httptools", access_log=False, log_level="error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
