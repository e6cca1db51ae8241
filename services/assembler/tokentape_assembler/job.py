"""One job: who waits for its outcome, until when, and how they hear of it."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson
import redis.asyncio

from tokentape_assembler.counts import Counts
from tokentape_assembler.executor import ExecutorError
from tokentape_assembler.telemetry import Telemetry
from tokentape_assembler.waiters import in_time
from tokentape_assembler.worker import RELEASE
from tokentape_contracts import keys, limits
from tokentape_contracts.errors import AssemblyFailed
from tokentape_contracts.jobs import AssembleJob


class Executors(Protocol):
    """What runs assemblies (`ExecutorPool`)."""

    async def run(self, message: bytes, timeout_s: float) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: `stored` (the result key holds samples or an error), `failed` or `dropped`.

    Attributes:
        code: of an error, stored or not.
        detail: of a failure the reason.
        timing_ms: stage → milliseconds.
        counts: what the assembly counted.
        waiters: the API processes that waited when the result was stored, or found stored: who comes later
            finds it. None if nothing is stored.
    """

    name: str
    code: str = ""
    detail: str = ""
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    waiters: Iterable[str] | None = None


DROPPED: Final = Outcome("dropped", detail="nobody waits for it any more")


class JobRunner:
    """The function that arq runs for each job.

    Safe to run twice, also at the same time: the result of a job is the same bytes every time, and an
    announcement says only that it is there.

    Args:
        data: to where the sessions are kept, results included.
        queue: to the queue's server.
    """

    def __init__(
        self,
        data: redis.asyncio.Redis,
        queue: redis.asyncio.Redis,
        executors: Executors,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._data = data
        self._queue = queue
        self._executors = executors
        self._telemetry = telemetry or Telemetry()

    async def run(self, ctx: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        """Gets one job's outcome, releases its place and announces it to every API process that waits.

        Raises:
            RedisError: Redis is out of reach; the API asks again for what was not done.
        """
        job = AssembleJob.from_json(fields)
        with self._telemetry.job(job, ctx["job_try"]):
            outcome = await self._outcome(job, ctx["job_try"])
            ctx[RELEASE](ctx["job_id"])
            if outcome is not DROPPED:
                await self._announce(job, outcome)
            self._telemetry.ended(
                outcome.name, outcome.code, outcome.detail, outcome.timing_ms, outcome.counts
            )

    async def _outcome(self, job: AssembleJob, job_try: int) -> Outcome:
        is_stored, waiters = await self._look(job)
        if not is_stored:
            if job_try > limits.JOB_TRIES:
                return _failed(f"{limits.JOB_TRIES} workers ended while they ran this job")
            try:
                return await self._assemble(job, waiters)
            except ExecutorError as error:
                is_stored, waiters = await self._look(job)  # that may have been its last deed
                if not is_stored:
                    return _failed(str(error))
        return Outcome(
            "stored", detail="by an earlier run", waiters=[key.decode(errors="replace") for key in waiters]
        )

    async def _look(self, job: AssembleJob) -> tuple[bool, dict[bytes, float]]:
        """Whether the result is stored, and who waits for it (`_waiters`)."""
        pipe = self._data.pipeline(transaction=False)
        pipe.exists(keys.samples(job.session_id, job.request))
        pipe.zrangebyscore(*in_time(job), withscores=True)
        is_stored, rows = await pipe.execute()
        return bool(is_stored), dict(rows)

    async def _assemble(self, job: AssembleJob, waiters: Mapping[bytes, float]) -> Outcome:
        """Runs the assembly for as long as somebody waits for it.

        Others may join with a later deadline, and one that gives up before its own is noticed within
        `limits.WAIT_SLICE_S`.
        """
        run: asyncio.Task[bytes] | None = None
        try:
            while waiters:
                run = run or asyncio.create_task(
                    self._executors.run(orjson.dumps(job.to_json()), limits.ASSEMBLY_TIMEOUT_S)
                )
                left_s = max(waiters.values()) - time.time()
                done, _ = await asyncio.wait({run}, timeout=min(left_s, limits.WAIT_SLICE_S))
                if done:
                    return _read(run.result())
                waiters = await self._waiters(job)
            return DROPPED
        finally:
            if run is not None and not run.done():
                run.cancel()
                await asyncio.wait({run})

    async def _waiters(self, job: AssembleJob) -> dict[bytes, float]:
        """API process → deadline in Unix seconds, without those whose deadline has passed."""
        return dict(await self._data.zrangebyscore(*in_time(job), withscores=True))

    async def _announce(self, job: AssembleJob, outcome: Outcome) -> None:
        fields: dict[Any, Any] = {
            b"session": job.session_id,
            b"request": job.request,
            b"outcome": outcome.name,
            b"code": outcome.code,
            b"detail": outcome.detail,
        }
        waiters = outcome.waiters
        if waiters is None:
            waiters = [key.decode(errors="replace") for key in await self._waiters(job)]
        pipe = self._queue.pipeline(transaction=False)
        for api_id in waiters:
            key = keys.replies(api_id)
            pipe.xadd(key, fields, maxlen=limits.REPLY_STREAM_LENGTH, approximate=True)
            pipe.expire(key, limits.REPLY_STREAM_S)
        await pipe.execute()


def _read(answer: bytes) -> Outcome:
    """The child's answer."""
    fields = orjson.loads(answer)
    return Outcome(
        fields["outcome"],
        fields["code"],
        fields["detail"],
        fields["timing_ms"],
        Counts.from_json(fields.get("counts", {})),
        fields.get("waiters"),
    )


def _failed(reason: str) -> Outcome:
    """The child is gone, and with it whatever it had done of the job."""
    return Outcome("failed", AssemblyFailed.code, reason)
