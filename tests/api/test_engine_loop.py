"""A long answer does not stop the event loop (INV-5)."""

import asyncio
import base64
import multiprocessing
import time
from collections.abc import AsyncIterator, Iterator
from multiprocessing.connection import Connection

import numpy as np
import orjson
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tokentape_api.engine import SGLangEngine, Wanted

LAYERS, CHOICES, OUTPUT = 60, 8, 64
MIB = 1 << 20


def serve(connection: Connection) -> None:
    """An engine in a process of its own: its work must not count as ours."""

    async def chat(request: Request) -> Response:
        prompt = len((await request.json())["input_ids"])
        values = np.full((prompt + OUTPUT - 1) * LAYERS * CHOICES, 7, np.int32)
        meta = {
            "prompt_tokens": prompt,
            "completion_tokens": OUTPUT,
            "output_token_logprobs": [[-0.5, 5, None]] * OUTPUT,
            "routed_experts": base64.b64encode(values.tobytes()).decode(),
        }
        message = {"role": "assistant", "content": "hi"}
        body = orjson.dumps({"choices": [{"message": message, "finish_reason": "stop", "meta_info": meta}]})

        async def parts() -> AsyncIterator[bytes]:
            for start in range(0, len(body), MIB):
                yield body[start : start + MIB]

        return StreamingResponse(parts(), media_type="application/json")

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[object] | None = None) -> None:
            await super().startup()
            connection.send(self.servers[0].sockets[0].getsockname()[1])

    routes = [Route("/v1/chat/completions", chat, methods=["POST"]), Route("/health", lambda _: Response())]
    Server(uvicorn.Config(Starlette(routes=routes), port=0, log_level="warning", access_log=False)).run()


@pytest.fixture
def engine_url() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        assert ours.poll(30)
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join(10)


async def test_the_loop_goes_on(engine_url: str) -> None:
    """While 64 MiB of routed experts come in and are decoded, no other task waits for long."""
    engine = SGLangEngine(engine_url, timeout_s=60.0)
    prompt = np.zeros(64 * MIB // (4 * LAYERS * CHOICES), np.int32)
    waits: list[float] = []

    async def tick() -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - began - 0.001)

    await engine.ready()
    ticking = asyncio.create_task(tick())
    found = await engine.generate(
        "s", prompt, {"messages": []}, {}, {"routed_experts": Wanted(layers=LAYERS)}
    )
    ticking.cancel()
    await engine.close()
    values = found.replay["routed_experts"].values
    assert values.shape == (len(prompt) + OUTPUT - 1, LAYERS, CHOICES)
    assert values.dtype == np.uint8
    assert (values == 7).all()
    # Other processes of the machine take the loop's turns too: a few late ones are theirs.
    assert len(waits) > 50
    assert sorted(waits)[-3] < 0.15
