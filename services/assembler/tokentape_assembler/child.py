"""The program of a child process: jobs come in as lines on stdin, answers go out as lines on stdout.

    parent → child    what it needs of the settings (`run.serve`)    once
    child → parent    {"ready": true} or {"error": why}         once
    parent → child    a job (`AssembleJob.to_json`)             any number of times, one at a time
    child → parent    {"outcome": …, "detail": …, "timing_ms": …}

Every line is one JSON object. The child has its own connection to Redis and stores the result itself: bytes
of a session never pass through the worker's event loop.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import orjson
import redis.asyncio
import uvloop

from tokentape_assembler.outcome import outcome_of
from tokentape_contracts import keys, limits
from tokentape_contracts.jobs import AssembleJob, JobResult
from tokentape_core.domain.path import Decode
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks
from tokentape_core.loading import load_function
from tokentape_core.store import RedisStore, connect, redis_errors
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_core.text.without_torch import without_torch

_DETAIL_CHARS: Final = 2_000


class Child:
    """Assembles one job after the other."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        decode: Decode,
        hooks: Hooks = DEFAULT_HOOKS,
        renderer: ChatRenderer | None = None,
    ) -> None:
        self._client = client
        self._store = RedisStore(client)
        self._decode = decode
        self._hooks = hooks
        self._renderer = renderer

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Does the job and stores its result; `outcome` is `stored`, or `failed` if there is none."""
        try:
            job = AssembleJob.from_json(orjson.loads(line))
            result = await outcome_of(job, self._store, self._decode, self._hooks, self._renderer)
            await self._save(job, result)
        except Exception as error:  # whatever it is, the waiting driver must hear of it
            traceback.print_exc()
            return {"outcome": "failed", "detail": _describe(error), "timing_ms": {}}
        detail = result.error.code if result.error else ""
        return {"outcome": "stored", "detail": detail, "timing_ms": result.timing_ms}

    async def _save(self, job: AssembleJob, result: JobResult) -> None:
        key = keys.samples(job.session_id, job.request)
        fields: dict[Any, Any] = result.to_hash()
        async with redis_errors(), self._client.pipeline(transaction=True) as pipe:
            pipe.hset(key, mapping=fields)
            pipe.expire(key, limits.RESULT_TTL_S)
            await pipe.execute()


def main() -> None:
    """Serves until stdin ends."""
    # The parent drains on these signals and needs its children for it; whoever signals a whole process group
    # or container must not take them away.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    without_torch()
    # A library that prints must not speak on the channel.
    channel = os.dup(1)
    os.dup2(2, 1)
    try:
        hello = orjson.loads(sys.stdin.buffer.readline())
        child = _child(hello)
    except Exception as error:
        _send(channel, {"error": _describe(error)})
        sys.exit(1)
    # What start-up left on the heap stays: a full collection over it would cost a job 200 ms.
    gc.freeze()
    # A job makes many containers and no cycles; collecting among them takes a tenth of its time.
    gc.set_threshold(200_000, 50, 100)
    _send(channel, {"ready": True})
    lines: SimpleQueue[bytes] = SimpleQueue()
    Thread(target=_receive, args=(lines,), daemon=True).start()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            _send(channel, runner.run(child.answer(lines.get())))


def _child(hello: Mapping[str, Any]) -> Child:
    template = Path(hello["chat_template"]) if hello["chat_template"] else None
    tokenizer = Tokenizer.load(hello["tokenizer"], chat_template=template)
    family = get_family(hello["family"])
    renderer = ChatRenderer(tokenizer, family) if tokenizer.has_template else None
    hooks = _hooks(hello["pick_hook"], hello["finish_hook"])
    return Child(connect(hello["redis_url"]), tokenizer.decode, hooks, renderer)


def _hooks(pick: str | None, finish: str | None) -> Hooks:
    return Hooks(
        load_function(pick) if pick else DEFAULT_HOOKS.pick,
        load_function(finish) if finish else DEFAULT_HOOKS.finish,
    )


def _receive(lines: SimpleQueue[bytes]) -> None:
    """Takes lines from stdin. Its end means that the parent is gone: nobody waits for the job in hand."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _send(channel: int, message: Mapping[str, Any]) -> None:
    # Far below the size of a pipe's buffer, so one write takes it all. A broken pipe ends stdin as well.
    with contextlib.suppress(BrokenPipeError):
        os.write(channel, orjson.dumps(message) + b"\n")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_DETAIL_CHARS]


if __name__ == "__main__":
    main()
