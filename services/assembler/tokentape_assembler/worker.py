"""arq's worker, made wakeable, with short leases and draining.

What differs from arq's own loop, and why:

- *Wakeable.* An idle worker blocks on the list `keys.WAKE` instead of sleeping, so that a job starts within
  milliseconds. The poll behind it finds what no token announces: the job of a worker that died.
- *Short leases.* arq's claim on a job lives as long as the job may take; here it lives `LEASE_S` and is
  renewed while the job runs, so that the job of a killed worker runs again after that.
- *Claims in one round trip*, and only on jobs that nobody holds. To take a job no clock is compared: jobs are
  never deferred, and the clock of the host that enqueued one may be ahead. (Whether somebody still waits for
  it, the job itself asks by the clock: `waiters`.)
- *Taken early.* A job that has released its place (`ctx[RELEASE]`) is announced while the next one begins.
- *Outages.* A Redis that is away stops nothing: the loop goes on when it is back.
- *Draining.* Once told to stop, it takes no more jobs and ends when the running ones have.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from math import isfinite
from typing import Any, Final

from arq.connections import ArqRedis
from arq.constants import in_progress_key_prefix, job_key_prefix, retry_key_prefix
from arq.worker import Worker, func
from redis.exceptions import RedisError

from tokentape_contracts import jobs, keys, limits
from tokentape_contracts.errors import text_of

_POLL_S: Final = 0.5
_LEASE_MS: Final = int(limits.LEASE_S * 1000)
_RENEWALS_PER_LEASE: Final = 4

RELEASE: Final = "release"
"""The name in arq's context of the function that gives a job's place to the next one."""

log = logging.getLogger("tokentape.assembler")


class AssemblyWorker(Worker):
    """Takes jobs from the queue while there is capacity for them.

    Args:
        client: from `arq_client`.
        function: runs one job. It bounds its own time; arq's timeout is only a backstop. It holds a place
            until it ends, or calls `ctx[RELEASE]` with its `ctx["job_id"]`.
        capacity: how many jobs could hold a place at the same time at this moment.
        stop: ends the worker once it is set and the running jobs have ended.
        lost: hears of each lease that ended while its job ran.
        refused: hears of each entry of the queue that is no job.
    """

    def __init__(
        self,
        client: ArqRedis,
        function: Callable[..., Coroutine[Any, Any, None]],
        capacity: Callable[[], int],
        stop: asyncio.Event,
        lost: Callable[[], None] = lambda: None,
        refused: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            [func(function, name=jobs.FUNCTION)],
            redis_pool=client,
            queue_name=keys.QUEUE,
            job_serializer=jobs.serialize,
            job_deserializer=jobs.deserialize,
            ctx={RELEASE: self._release},
            job_timeout=2 * limits.ASSEMBLY_TIMEOUT_S,
            keep_result=0,
            # One more than the job itself allows: it gives up with an announcement, arq without a word.
            max_tries=limits.JOB_TRIES + 1,
            poll_delay=_POLL_S,
            queue_read_limit=limits.QUEUE_READ,
            handle_signals=False,
        )
        self._capacity = capacity
        self._stop = stop
        self._lost = lost
        self._refused = refused
        self._holding: set[str] = set()
        self._released = asyncio.Event()

    @property
    def _free(self) -> int:
        return self._capacity() - len(self._holding)

    def _release(self, job_id: str) -> None:
        self._holding.discard(job_id)
        self._released.set()

    async def main(self) -> None:
        """Works until `stop` is set and the running jobs have ended."""
        renewal = asyncio.create_task(self._renew_leases())
        try:
            while not self._stop.is_set():
                try:
                    await self._poll_iteration()
                    await self._wait_for_work()
                except (RedisError, OSError) as error:
                    log.warning("Redis is away, trying again: %s", text_of(error))
                    await asyncio.sleep(_POLL_S)
            if self.tasks:
                log.info("stopping; %d running jobs are finished first", len(self.tasks))
                await asyncio.wait(self.tasks.values())
        finally:
            renewal.cancel()
            await asyncio.wait({renewal})

    async def _poll_iteration(self) -> None:
        if self._free > 0:
            await self.start_jobs(await self.pool.zrange(self.queue_name, 0, self.queue_read_limit - 1))

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Claims and starts as many of the jobs as are free and there is capacity for, oldest first."""
        names = []
        for job_id in job_ids:
            try:
                names.append(job_id.decode())
            except UnicodeDecodeError as error:
                await self._refuse(job_id, error)
        names = [name for name in names if name not in self.tasks]
        claims: list[bytes | None] = [None] * len(names)
        if len(names) > 1:  # one is claimed at once: a round trip less on an idle worker
            claims = await self.pool.mget([in_progress_key_prefix + name for name in names])
        for name, claim in zip(names, claims, strict=True):
            if self._free <= 0 or self._stop.is_set():
                return
            if claim is None and (score := await self._claim(name)) is not None:
                task = asyncio.create_task(self._run(name, score))
                self.tasks[name] = task
                self._holding.add(name)
                task.add_done_callback(partial(self._ended, name))

    async def _claim(self, job_id: str) -> int | None:
        """Takes the lease on a job; its queue score, or None if it is held or done elsewhere."""
        key = in_progress_key_prefix + job_id
        async with self.pool.pipeline(transaction=True) as pipe:
            pipe.set(key, b"1", nx=True, px=_LEASE_MS)
            pipe.zscore(self.queue_name, job_id)
            claimed, score = await pipe.execute()
        if not claimed:
            return None
        if score is None:
            await self.pool.delete(key)
            return None
        return int(score) if isfinite(score) else 0

    async def _run(self, job_id: str, score: int) -> None:
        """One job, as arq runs it; what arq itself cannot read goes."""
        try:
            await self.run_job(job_id, score)
        except (RedisError, OSError):
            raise
        except Exception as error:
            await self._refuse(job_id.encode(), error)

    async def _refuse(self, job_id: bytes, error: Exception) -> None:
        """Takes an entry out of the queue that is no job: it would stand before the others for ever."""
        log.warning("entry_refused kind=job: %r: %s", job_id[:100], text_of(error))
        self._refused()
        pipe = self.pool.pipeline(transaction=False)
        pipe.zrem(self.queue_name, job_id)
        for prefix in (job_key_prefix, in_progress_key_prefix, retry_key_prefix):
            pipe.delete(prefix.encode() + job_id)
        await pipe.execute()

    def _ended(self, job_id: str, task: asyncio.Task[Any]) -> None:
        del self.tasks[job_id]
        self._release(job_id)
        if not task.cancelled() and (error := task.exception()) is not None:
            # arq could not note the end of the job, which is still in the queue and free when its lease ends.
            log.warning("job %s could not be finished: %r", job_id, error)

    async def _wait_for_work(self) -> None:
        """Returns when there may be something to do, and at least every `_POLL_S`."""
        if self._free > 0:
            # redis-py's types know no fractions of a second.
            await self.pool.blpop([keys.WAKE], timeout=_POLL_S)  # type: ignore[arg-type,misc]
        else:
            # A token is left for a worker that can use it.
            self._released.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._released.wait()

    async def _renew_leases(self) -> None:
        gone: dict[str, int] = {}
        while True:
            await asyncio.sleep(limits.LEASE_S / _RENEWALS_PER_LEASE)
            with contextlib.suppress(RedisError, OSError):
                names = list(self.tasks)
                pipe = self.pool.pipeline(transaction=False)
                for job_id in names:
                    # Not SET: a claim must not come back after its job has ended.
                    pipe.pexpire(in_progress_key_prefix + job_id, _LEASE_MS)
                renewed = await pipe.execute()
                # The claim of a job that ends at this moment is gone too; hence only the second time counts.
                gone = {
                    name: gone.get(name, 0) + 1
                    for name, is_held in zip(names, renewed, strict=True)
                    if not is_held and name in self.tasks
                }
                for job_id in (name for name, times in gone.items() if times == 2):
                    log.warning("the lease of job %s is lost; another worker may run it too", job_id)
                    self._lost()


def arq_client(client: Any) -> ArqRedis:
    """arq's client on the connections of another one, with our job format."""
    return ArqRedis(client.connection_pool, job_serializer=jobs.serialize, job_deserializer=jobs.deserialize)
