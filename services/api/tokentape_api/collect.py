"""Waiting for the workers: a samples request becomes a job, and its result comes back.

A result lies under a key of its own; the announcement on this process's reply stream only says that it is
worth looking. One reader per process serves all waiting requests. If an announcement or even the job is lost,
the waiter notices within `limits.WAIT_SLICE_S`: it looks at the result key again and enqueues again, which
does nothing while the job is there.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping

import redis.asyncio
from arq.constants import in_progress_key_prefix, job_key_prefix
from arq.jobs import serialize_job
from redis.exceptions import RedisError

from tokentape_contracts import jobs, keys, limits
from tokentape_contracts.errors import (
    BY_CODE,
    AssemblyFailed,
    DeadlineExceeded,
    QueueFull,
    StoreUnavailable,
    TokentapeError,
)
from tokentape_contracts.jobs import AssembleJob, StoredResult
from tokentape_core.store import redis_errors

log = logging.getLogger(__name__)

_READ_BLOCK_MS = 2_000
_READ_PAUSE_S = 0.2
_WAITERS_EXTRA_S = 60
_LEAVE_S = 0.5
"""A Redis that is away must not keep a request that has nothing to wait for any more."""


class Collector:
    """Hands jobs to the workers and waits for their results.

    Args:
        queue: to the queue's server, for commands that answer at once.
        reader: to the queue's server, for the reply stream; its replies may take longer than two seconds.
        data: to where the sessions are kept, results included; closed by whoever made it.
    """

    def __init__(
        self,
        queue: redis.asyncio.Redis,
        reader: redis.asyncio.Redis,
        data: redis.asyncio.Redis,
    ) -> None:
        self._queue = queue
        self._reader = reader
        self._data = data
        self._api_id = uuid.uuid4().hex
        self._waiting: dict[tuple[str, str], set[asyncio.Future[TokentapeError | None]]] = {}
        self._task: asyncio.Task[None] | None = None
        self._refused: Callable[[str], object] = lambda _: None

    def is_reading(self) -> bool:
        """Whether announcements are read; without them a collect hears of its result late."""
        return self._task is not None and not self._task.done()

    async def start(self, refused: Callable[[str], object] = lambda _: None) -> None:
        """Begins to read announcements.

        Args:
            refused: hears of each entry in Redis that cannot be read, by its kind (`telemetry.ENTRIES`).
        """
        self._refused = refused
        self._task = asyncio.create_task(self._read_announcements())

    async def close(self) -> None:
        """Stops reading and closes the connections."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        for client in (self._queue, self._reader):
            await client.aclose()

    async def collect(self, job: AssembleJob, deadline_s: float) -> StoredResult:
        """The result of the job; `payload` has its bytes.

        Equal concurrent requests, also of other processes, share one job.

        Args:
            deadline_s: seconds from now.

        Raises:
            DeadlineExceeded: no result in time, and at which stage. Like a request that is cancelled, because
                its client is gone, it frees the worker or the job's place in the queue.
            QueueFull: too many jobs wait already.
            StoreUnavailable: Redis fails, here or at the worker.
            AssemblyFailed: the worker's child process died; nothing was stored.
            InternalError: the assembly met a defect of ours.
        """
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                return await self._collect(job, deadline_s)
        except TimeoutError:
            if not deadline.expired():
                raise
            stage = await self._leave(job)
            raise DeadlineExceeded(f"the samples were not ready within {deadline_s:.3g} s: {stage}") from None
        except asyncio.CancelledError:
            await self._leave(job)
            raise

    async def _collect(self, job: AssembleJob, deadline_s: float) -> StoredResult:
        now = asyncio.get_running_loop().time
        end = now() + deadline_s
        while True:
            with self._announcement(job) as announced:
                left_s = end - now()
                result, (queued, is_queued) = await asyncio.gather(
                    self._look(job, time.time() + left_s), self._look_at_queue(job, left_s)
                )
                if result is not None:
                    return result
                if not is_queued:
                    if queued >= limits.QUEUE_DEPTH:
                        raise QueueFull(f"{queued} collects wait for a worker already")
                    await enqueue(self._queue, job, left_s)
                await asyncio.wait({announced}, timeout=limits.WAIT_SLICE_S)
                if announced.done():
                    if (failure := announced.result()) is not None:
                        raise failure
                    if (result := await self._result(job)) is not None:
                        return result

    async def _leave(self, job: AssembleJob) -> str:
        """Gives up what nobody waits for any more, and says what used up the time.

        The worker that has the job notices within `limits.WAIT_SLICE_S`. A job that no worker has gives its
        place in the queue to another; who begins to wait for it at this moment enqueues it again.
        """
        try:
            async with asyncio.timeout(_LEAVE_S):
                with redis_errors():
                    is_running, queued = await self._take_back(job)
        except (StoreUnavailable, TimeoutError):
            return "Redis does not answer"
        if is_running:
            return "a worker was still assembling them"
        return f"no worker had taken the job, one of {queued} that wait or run; are there enough workers?"

    async def _take_back(self, job: AssembleJob) -> tuple[bool, int]:
        """Takes back what nobody waits for; whether the job runs, and how many waited or ran."""
        pipe = self._queue.pipeline(transaction=False)
        pipe.exists(in_progress_key_prefix + job.job_id)
        pipe.zcard(keys.QUEUE)
        is_running, queued = await pipe.execute()
        if (job.session_id, job.request) not in self._waiting:
            waiters = keys.waiters(job.session_id, job.request)
            pipe = self._data.pipeline(transaction=True)
            pipe.zrem(waiters, self._api_id)
            pipe.zcount(waiters, f"({time.time()}", "+inf")
            _, others = await pipe.execute()
            if not others and not is_running:
                pipe = self._queue.pipeline(transaction=True)
                pipe.zrem(keys.QUEUE, job.job_id)
                pipe.delete(job_key_prefix + job.job_id)
                await pipe.execute()
        return bool(is_running), queued

    @contextlib.contextmanager
    def _announcement(self, job: AssembleJob) -> Iterator[asyncio.Future[TokentapeError | None]]:
        """The next announcement of this job: None for a stored result, else why there is none."""
        announced: asyncio.Future[TokentapeError | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((job.session_id, job.request), set())
        waiting.add(announced)
        try:
            yield announced
        finally:
            waiting.discard(announced)
            if not waiting:
                self._waiting.pop((job.session_id, job.request), None)

    async def jobs(self) -> int:
        """How many jobs wait or run, over all processes.

        Raises:
            StoreUnavailable: Redis cannot be reached.
        """
        with redis_errors():
            return int(await self._queue.zcard(keys.QUEUE))

    async def payload(self, job: AssembleJob, result: StoredResult) -> AsyncIterator[bytes]:
        """The result's payload, one part after the other: this process never holds the whole of a large one.

        Raises:
            StoreUnavailable: Redis cannot be reached, or the result has expired meanwhile.
        """
        yield result.first
        for part in range(1, result.parts):
            with redis_errors():
                key = keys.samples(job.session_id, job.request)
                data: bytes | None = await self._data.hget(key, str(part))  # type: ignore[misc]
            if data is None:
                raise StoreUnavailable(f"part {part} of the result has expired before it was sent")
            yield data

    async def _look(self, job: AssembleJob, deadline: float) -> StoredResult | None:
        """Registers as a waiter, and only then looks for the result: so none falls between the two."""
        waiters = keys.waiters(job.session_id, job.request)
        with redis_errors():
            pipe = self._data.pipeline(transaction=False)
            pipe.zadd(waiters, {self._api_id: deadline}, gt=True)
            pipe.expire(waiters, int(limits.COLLECT_DEADLINE_MAX_S) + _WAITERS_EXTRA_S)
            pipe.hmget(*_head(job))
            *_, fields = await pipe.execute()
        return await self._stored(job, fields)

    async def _result(self, job: AssembleJob) -> StoredResult | None:
        with redis_errors():
            fields: list[bytes | None] = await self._data.hmget(*_head(job))  # type: ignore[misc]
        return await self._stored(job, fields)

    async def _stored(self, job: AssembleJob, fields: list[bytes | None]) -> StoredResult | None:
        """What these fields say. A result that cannot be read goes, so that a worker makes another."""
        head, first = fields
        if head is None:
            return None
        try:
            return StoredResult.from_fields(head, first)
        except (KeyError, TypeError, ValueError) as error:
            self._refuse("result", error)
            with redis_errors():
                await self._data.delete(keys.samples(job.session_id, job.request))
            return None

    async def _look_at_queue(self, job: AssembleJob, left_s: float) -> tuple[int, bool]:
        """How many jobs wait or run, and whether this one is among them; it then stays for so long."""
        key = job_key_prefix + job.job_id
        with redis_errors():
            pipe = self._queue.pipeline(transaction=False)
            pipe.zcard(keys.QUEUE)
            pipe.zscore(keys.QUEUE, job.job_id)
            pipe.exists(key)
            pipe.pexpire(key, _job_ms(left_s), gt=True)
            queued, score, is_kept, _ = await pipe.execute()
        return queued, score is not None and bool(is_kept)

    async def _read_announcements(self) -> None:
        """Reads this process's reply stream for ever; nothing that Redis does ends it."""
        stream = keys.replies(self._api_id)
        last = b"0"
        while True:
            try:
                with redis_errors():
                    read = await self._reader.xread({stream: last}, block=_READ_BLOCK_MS)
            # A failover ends a read that waits with an error of its own.
            except (StoreUnavailable, RedisError) as error:
                log.warning("cannot read announcements: %s", error)
                await asyncio.sleep(_READ_PAUSE_S)
                continue
            for _, entries in read:
                for entry_id, fields in entries:
                    last = entry_id
                    try:
                        self._announce(fields)
                    except (KeyError, ValueError) as error:
                        self._refuse("announcement", error)

    def _announce(self, fields: Mapping[bytes, bytes]) -> None:
        """Wakes whoever waits for this. Raises `KeyError` or `ValueError` for what is no announcement."""
        key = fields[b"session"].decode(), fields[b"request"].decode()
        failure = _failure(fields)
        for announced in self._waiting.get(key, ()):
            if not announced.done():
                announced.set_result(failure)

    def _refuse(self, kind: str, error: Exception) -> None:
        log.warning("entry_refused kind=%s: %s: %s", kind, type(error).__name__, error)
        self._refused(kind)


async def enqueue(queue: redis.asyncio.Redis, job: AssembleJob, left_s: float) -> bool:
    """Enqueues the job and wakes a worker; False if it was in the queue already.

    What arq's `enqueue_job` does, without its lock: `NX` says the same in one round trip instead of four.

    Args:
        left_s: how long someone waits for it; it is kept a little longer.
    """
    now_ms = int(time.time() * 1000)
    data = serialize_job(jobs.FUNCTION, (job.to_json(),), {}, None, now_ms, serializer=jobs.serialize)
    pipe = queue.pipeline(transaction=True)
    pipe.set(job_key_prefix + job.job_id, data, px=_job_ms(left_s), nx=True)
    pipe.zadd(keys.QUEUE, {job.job_id: now_ms}, nx=True)
    pipe.rpush(keys.WAKE, b"1")
    pipe.ltrim(keys.WAKE, -limits.QUEUE_DEPTH, -1)
    with redis_errors():
        _, added, *_ = await pipe.execute()
    return bool(added)


def _failure(fields: Mapping[bytes, bytes]) -> TokentapeError | None:
    """Why there is no result, if there is none; an older worker names no code."""
    if fields[b"outcome"] != b"failed":
        return None
    return BY_CODE.get(fields.get(b"code", b"").decode(), AssemblyFailed)(fields[b"detail"].decode())


def _job_ms(left_s: float) -> int:
    """How long a job is kept for one who waits for so long."""
    return int((max(1.0, left_s) + _WAITERS_EXTRA_S) * 1000)


def _head(job: AssembleJob) -> tuple[str, list[str]]:
    """Where a result begins: the key of its hash, and the fields."""
    return keys.samples(job.session_id, job.request), [jobs.HEAD, jobs.FIRST_PART]
