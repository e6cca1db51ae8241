"""The entry points of a worker process."""

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Final

import orjson
import uvloop

from tokentape_assembler.archive import Archive, Archiver
from tokentape_assembler.endpoint import Endpoint
from tokentape_assembler.executor import ExecutorPool
from tokentape_assembler.job import JobRunner
from tokentape_assembler.settings import AssemblerSettings
from tokentape_assembler.telemetry import Telemetry
from tokentape_assembler.worker import AssemblyWorker, arq_client
from tokentape_core import heap, tracing
from tokentape_core.metrics import observe_lag
from tokentape_core.store import connect
from tokentape_core.text.hub import locate

# -P: a module in the current directory must not stand in for one of ours.
CHILD: Final = (sys.executable, "-P", "-m", "tokentape_assembler.child")

log = logging.getLogger("tokentape.assembler")


def run(settings: AssemblerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT; then it takes no more jobs, finishes the running ones and ends.

    Returns:
        The process's exit code: 0.

    Raises:
        ArchiveError, ChildDied, ValueError: as `serve`.
        TokenizerError: there is no such tokenizer.
    """
    # Here, and not in each child, the model hub is asked.
    settings = replace(settings, tokenizer=locate(settings.tokenizer))
    # arq logs a line with the arguments for every job; ours has what matters and no payload.
    logging.getLogger("arq").setLevel(logging.WARNING)
    uvloop.run(_serve_until_signal(settings))
    return 0


async def serve(settings: AssemblerSettings, stop: asyncio.Event) -> None:
    """Runs a worker until `stop` is set; then it takes no more jobs, finishes the running ones and returns.

    Raises:
        ArchiveError: there is no such archive.
        ChildDied: a child process could not start, for example as there is no such tokenizer.
        ValueError: a Redis URL is none, or the metrics port cannot be used.
    """
    archive = Archive(settings.archive_url) if settings.archive_url else None
    client = connect(settings.redis_url)
    queue = client if settings.queue_url == settings.redis_url else connect(settings.queue_url)
    hello = orjson.dumps(
        {
            "redis_url": settings.redis_url,
            "text": settings.to_json(),
            "pick_hook": settings.pick_hook,
            "finish_hook": settings.finish_hook,
        }
    )
    telemetry = Telemetry(tracing.from_environment("tokentape-assembler"))
    pool = ExecutorPool(settings.workers, CHILD, hello, lambda reason: telemetry.restarts[reason].inc())
    telemetry.children.set_function(lambda: pool.ready)
    background = [asyncio.create_task(observe_lag(telemetry.loop_lag_seconds))]
    stack = AsyncExitStack()
    try:
        if settings.metrics_port is not None:
            endpoint = Endpoint(
                telemetry, {client, queue}, lambda: pool.ready, settings.host, settings.metrics_port
            )
            await stack.enter_async_context(endpoint)
        await pool.start()
        arq = arq_client(queue)
        runner = JobRunner(client, queue, pool, telemetry)
        refused = telemetry.entries_refused
        worker = AssemblyWorker(
            arq,
            runner.run,
            lambda: pool.ready,
            stop,
            lost=telemetry.leases_lost.inc,
            refused=refused["job"].inc,
        )
        telemetry.running.set_function(lambda: len(worker.tasks))
        heap.settle()
        log.info("the assembler is ready: %d at a time, tokenizer %s", settings.workers, settings.tokenizer)
        if archive is not None:
            background.append(asyncio.create_task(Archiver(client, archive, refused["sealed"].inc).run()))
        await worker.async_run()
    finally:
        for task in background:
            task.cancel()
        await asyncio.wait(background)
        await pool.close()
        await stack.aclose()
        for connected in {client, queue}:
            await connected.aclose()
        await asyncio.to_thread(telemetry.tracing.close)


async def _serve_until_signal(settings: AssemblerSettings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)
