"""The program of a child process: jobs come in as lines on stdin, answers go out as lines on stdout.

    parent → child    what it needs of the settings (`run.serve`)    once
    child → parent    {"ready": true} or {"error": why}         once
    parent → child    a job (`AssembleJob.to_json`)             any number of times, one at a time
    child → parent    {"outcome": …, "code": …, "detail": …, "timing_ms": …, "counts": …, "waiters": …}

Every line is one JSON object. The child has its own connection to Redis and stores the result itself: bytes
of a session never pass through the worker's event loop.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import orjson
import redis.asyncio
import uvloop

from tokentape_assembler.outcome import Assembled, outcome_of
from tokentape_assembler.toolchain import assembled_by, load_toolchain
from tokentape_assembler.waiters import in_time
from tokentape_contracts import audit, keys, limits
from tokentape_contracts.audit import AssembledBy, SamplesAssembled
from tokentape_contracts.errors import (
    AssemblyFailed,
    EventUnsupported,
    InternalError,
    SessionNotFound,
    TokentapeError,
)
from tokentape_contracts.jobs import AssembleJob
from tokentape_core.domain.path import Decode
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks
from tokentape_core.store import RedisStore, connect, redis_errors
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.settings import TextSettings
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
        by: AssembledBy | None = None,
    ) -> None:
        self._client = client
        self._store = RedisStore(client)
        self._decode = decode
        self._hooks = hooks
        self._renderer = renderer
        self._by = by or assembled_by(hooks, renderer)

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Does the job and stores its result; `outcome` is `stored`, or `failed` if there is none.

        `code` is that of the error, stored or not.
        """
        try:
            job = AssembleJob.from_json(orjson.loads(line))
            result = await outcome_of(job, self._store, self._decode, self._hooks, self._renderer)
            waiters = await self._save(job, result)
        except Exception as error:  # whatever it is, the waiting driver must hear of it
            traceback.print_exc()
            return {"outcome": "failed", "timing_ms": {}, "counts": {}, **_failure(error)}
        return {
            "outcome": "stored",
            "code": result.error.code if result.error else "",
            "detail": "",
            "timing_ms": result.timing_ms,
            "counts": result.counts.to_json(),
            "waiters": waiters,
        }

    async def _save(self, job: AssembleJob, result: Assembled) -> list[str]:
        """Writes the result and its audit entry: both or nothing. The API processes that wait at this moment.

        That this version cannot read an event says nothing of the session, which a newer worker assembles:
        the refusal stays for those who wait now, and is not audited.
        """
        key = keys.samples(job.session_id, job.request)
        is_ours = isinstance(result.error, EventUnsupported)
        with redis_errors():
            async with self._client.pipeline(transaction=True) as pipe:
                for field, value in result.to_hash():
                    pipe.hset(key, field, value)  # type: ignore[arg-type]
                # A waiter looks once in a slice; who misses it asks again.
                pipe.expire(key, int(2 * limits.WAIT_SLICE_S) if is_ours else limits.RESULT_TTL_S)
                # Without a session there is none that an entry would belong to.
                if not is_ours and not isinstance(result.error, SessionNotFound):
                    audit_key, entry = keys.audit(job.session_id), audit.encode(self._entry(job, result))
                    pipe.xadd(audit_key, dict[Any, Any](entry), maxlen=limits.AUDIT_ENTRIES, approximate=True)
                    # Not less than it has: a DELETE may have come, and have set more.
                    pipe.expire(audit_key, limits.RETENTION_S, nx=True)
                    pipe.expire(audit_key, limits.RETENTION_S, gt=True)
                pipe.zrangebyscore(*in_time(job))
                *_, waiters = await pipe.execute()
        return [api_id.decode(errors="replace") for api_id in waiters]

    def _entry(self, job: AssembleJob, result: Assembled) -> SamplesAssembled:
        return SamplesAssembled(
            id=uuid.uuid4().hex,
            tail=job.tail,
            request=job.request,
            contract=job.contract,
            max_seq_len=job.max_seq_len,
            metadata=job.metadata,
            digest=None if result.error else result.digest,
            error=(result.error.code, result.error.detail) if result.error else None,
            samples=result.samples,
            by=self._by,
            at=time.time(),
        )


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
    toolchain = load_toolchain(
        TextSettings.from_json(hello["text"]),
        pick_hook=hello["pick_hook"],
        finish_hook=hello["finish_hook"],
    )
    client = connect(hello["redis_url"])
    return Child(client, toolchain.decode, toolchain.hooks, toolchain.renderer, toolchain.by)


def _receive(lines: SimpleQueue[bytes]) -> None:
    """Takes lines from stdin. Its end means that the parent is gone: nobody waits for the job in hand."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def _send(channel: int, message: Mapping[str, Any]) -> None:
    # Far below the size of a pipe's buffer, so one write takes it all. A broken pipe ends stdin as well.
    with contextlib.suppress(BrokenPipeError):
        os.write(channel, orjson.dumps(message) + b"\n")


def _failure(error: Exception) -> dict[str, str]:
    """Whose fault it is: Redis's, the machine's, or ours."""
    match error:
        case TokentapeError():
            return {"code": error.code, "detail": error.detail[:_DETAIL_CHARS]}
        case MemoryError():
            return {"code": AssemblyFailed.code, "detail": "the child process had too little memory"}
    return {"code": InternalError.code, "detail": f"a defect of Tokentape in a worker: {_describe(error)}"}


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_DETAIL_CHARS]


if __name__ == "__main__":
    main()
