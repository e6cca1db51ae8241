"""A whole deployment to do harm to: two API processes, two workers, and Valkey with an append-only file."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from tests.faults import engine
from tests.faults.checker import Report, check, read_all
from tests.faults.history import History
from tests.faults.workload import Workload
from tests.support.fault_proxy import FaultProxy
from tests.support.processes import Fleet, Running, wait_for, wait_until
from tokentape_cli.embedded import EmbeddedValkey
from tokentape_cli.processes import free_port
from tokentape_contracts import keys, limits
from tokentape_core.store import connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer
from tokentape_engine.tokenizer import chat_template, small_tokenizer

APIS, WORKERS = 2, 2
WITHOUT_TTL = frozenset({keys.QUEUE, keys.SEALED, keys.WAKE})
"""Keys that live for ever: one each, and bounded."""
ENGINE_ANSWERS = 200_000
"""More than an engine gives before another takes its place."""
SETTLED_S = 15.0
"""Within this after a run no job waits any more."""


class Cluster:
    """The processes, each with a proxy of its own before Redis, and what was done to them.

    Args:
        proxied: False leaves all proxies out, for measurements.

    Attributes:
        api_proxies, worker_proxies: before Redis, one for each process.
        engine_proxies: before the engine, for all API processes.
        agent_proxies: before each API process, for those who use `broken_urls`.
        faults: how many faults of each kind were injected.
        total: the reports of all runs, added up.
        report: that of the last run.
        scratch: for requests that only ask whether everything works.
    """

    def __init__(self, valkey: EmbeddedValkey, running: Fleet, seed: int, *, proxied: bool = True) -> None:
        self.valkey = valkey
        self.faults: Counter[str] = Counter()
        self.total = Report()
        self.report = Report()
        self._ports = [free_port() for _ in range(APIS)]
        self._engine_port = free_port()
        self.api_proxies = [FaultProxy(valkey.port) for _ in range(APIS if proxied else 0)]
        self.worker_proxies = [FaultProxy(valkey.port) for _ in range(WORKERS if proxied else 0)]
        self.agent_proxies = [FaultProxy(port) for port in self._ports if proxied]
        self.engine_proxies = [FaultProxy(self._engine_port)] if proxied else []
        self.apis: list[Running] = []
        self.workers: list[Running] = []
        self.tokenizer = Tokenizer.load(str(running.tokenizer))
        self.renderer = ChatRenderer(self.tokenizer, get_family(running.family))
        self._fleet = running
        self._seed = seed
        self._engines = 0
        self._children: set[int] = set()
        self._ending: list[Running] = []
        self.scratch = History()

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def broken_urls(self) -> list[str]:
        """The API processes, by way of `agent_proxies`."""
        return [f"http://127.0.0.1:{proxy.port}" for proxy in self.agent_proxies]

    @property
    def proxies(self) -> list[FaultProxy]:
        """Those before Redis."""
        return [*self.api_proxies, *self.worker_proxies]

    @property
    def all_proxies(self) -> list[FaultProxy]:
        return [*self.proxies, *self.agent_proxies, *self.engine_proxies]

    def workload(self, history: History, draw: random.Random, urls: Sequence[str] | None = None) -> Workload:
        """For single requests; afterwards call `verify`."""
        return Workload(urls or self.urls, history, draw.randrange(2**32))

    def start(self, replay: str) -> None:
        """Starts everything and waits until it is ready.

        Args:
            replay: of the sessions, as `tokentape api` takes it.
        """
        self._replay = replay
        self.start_engine()
        self.apis = [self._launch_api(number) for number in range(APIS)]
        self.workers = [self._launch_worker(number) for number in range(WORKERS)]
        self._wait()

    def heal(self) -> None:
        """Starts again what has ended, and waits until everything is ready."""
        while self._ending:
            self._ending.pop().process.wait(40)
        if self.engine.process.poll() is not None:
            self.start_engine()
        for number, api in enumerate(self.apis):
            if api.process.poll() is not None:
                self.apis[number] = self._launch_api(number)
        for number, worker in enumerate(self.workers):
            if worker.process.poll() is not None:
                self.workers[number] = self._launch_worker(number)
        self._wait()

    def kill(self, running: Running) -> None:
        """SIGKILL; does not wait for the end."""
        self._note_children(running)
        running.process.kill()
        self._ending.append(running)

    def terminate(self, running: Running) -> None:
        """SIGTERM."""
        self._note_children(running)
        running.process.terminate()
        self._ending.append(running)

    def start_engine(self) -> None:
        """Starts the engine, and waits until it answers."""
        (end,) = self.tokenizer.encode("<|im_end|>")
        self.engine = self._fleet.start(
            *("engine", "tests.faults.engine", "--port", str(self._engine_port), "--end", str(end)),
            *("--seed", str(self._seed), "--first", str(self._engines * ENGINE_ANSWERS)),
        )
        self._engines += 1
        wait_for(f"http://127.0.0.1:{self._engine_port}/health", self.engine)

    def kill_redis(self) -> None:
        """SIGKILL to the server; `valkey.restart` brings it back."""
        if self.valkey.pid is None:
            raise RuntimeError("the server does not run")
        os.kill(self.valkey.pid, signal.SIGKILL)

    def child(self, worker: Running) -> psutil.Process:
        """The worker's child that assembles."""
        found: list[psutil.Process] = []

        def is_there() -> bool:
            found[:] = psutil.Process(worker.process.pid).children()
            return len(found) == 1

        wait_until(is_there, worker)
        return found[0]

    def _note_children(self, running: Running) -> None:
        if running.process.poll() is None:
            self._children |= {child.pid for child in psutil.Process(running.process.pid).children()}

    def _launch_api(self, number: int) -> Running:
        replay = () if self._replay == "off" else ("--replay-layers", str(engine.LAYERS))
        engine_port = self.engine_proxies[0].port if self.engine_proxies else self._engine_port
        return self._fleet.tokentape(
            *("api", "--port", str(self._ports[number]), "--engine-url", f"http://127.0.0.1:{engine_port}"),
            *("--family", self._fleet.family, "--tokenizer", str(self._fleet.tokenizer)),
            *("--redis-url", self._redis_url(self.api_proxies, number)),
            *("--replay", self._replay, *replay),
        )

    def _launch_worker(self, number: int) -> Running:
        return self._fleet.tokentape(
            *("assembler", "--tokenizer", str(self._fleet.tokenizer), "--family", self._fleet.family),
            *("--redis-url", self._redis_url(self.worker_proxies, number)),
            *("--finish-hook", "tests.faults.hooks.harm"),
        )

    def _redis_url(self, proxies: Sequence[FaultProxy], number: int) -> str:
        return proxies[number].url(self.valkey.url) if proxies else self.valkey.url

    def _wait(self) -> None:
        for url, api in zip(self.urls, self.apis, strict=True):
            wait_for(f"{url}/health", api)
        for worker in self.workers:
            wait_until(lambda worker=worker: "the assembler is ready" in worker.output(), worker)  # type: ignore[misc]

    @asynccontextmanager
    async def load(
        self,
        draw: random.Random,
        episodes: int = 5,
        *,
        allowed: Collection[str] = (),
        metadata: dict[str, Any] | None = None,
        urls: Sequence[str] | None = None,
    ) -> AsyncIterator[History]:
        """Plays episodes while the block lasts; afterwards mends everything and checks the history.

        Args:
            allowed: codes of refusals that the block's faults explain.
            metadata: sent with every collect, for the finish hook.
            urls: what the clients address, in place of the API processes themselves.
        """
        history = History()
        workload = Workload(urls or self.urls, history, draw.randrange(2**32), metadata=metadata)
        async with workload.running(episodes):
            try:
                yield history
            finally:
                for proxy in self.all_proxies:
                    proxy.disarm()
                    proxy.release()
        await asyncio.to_thread(self.heal)
        await self.verify(history, allowed=allowed)

    async def verify(self, history: History, *, allowed: Collection[str] = ()) -> Report:
        """Fails unless nothing is lost, doubled, left over or still running."""
        report = await self.examine(history, allowed=allowed)
        if report.problems:
            raise AssertionError("\n".join(report.problems))
        if not report.acknowledged:
            raise AssertionError("no turn was acknowledged")
        return report

    async def examine(self, history: History, *, allowed: Collection[str] = ()) -> Report:
        """Compares the history with Redis."""
        client = connect(self.valkey.url)
        try:
            left = await leftovers(client, self._children)
            recorded = await read_all(client, history.sessions)
        finally:
            await client.aclose()
        report = await check(history, recorded, self.tokenizer.decode, self.renderer, allowed=allowed)
        self._children.clear()
        report.problems += left
        for name in ("acknowledged", "recorded", "lost", "doubled", "unclear", "collects"):
            setattr(self.total, name, getattr(self.total, name) + getattr(report, name))
        self.report = report
        return report


async def leftovers(client: Any, children: Collection[int]) -> list[str]:
    """Jobs, leases, keys without a time to live and processes that should not be there any more.

    Args:
        children: process ids of those whose parents were ended.
    """
    problems = []
    if not await _within(SETTLED_S, lambda: _is_settled(client)):
        queue = await client.zrange(keys.QUEUE, 0, -1)
        problems.append(f"INV-10: left in the queue: {queue}, {await client.keys('arq:*')}")
    for key in await client.keys("*"):
        if await client.ttl(key) == -1 and key.decode() not in WITHOUT_TTL:
            problems.append(f"INV-10: {key.decode()} lives for ever")
    if await client.llen(keys.WAKE) > limits.QUEUE_DEPTH:
        problems.append("INV-10: too many wake-up tokens")

    async def are_gone() -> bool:
        return not any(map(_runs, children))

    if not await _within(SETTLED_S, are_gone):
        problems.append(f"INV-10: orphans: {sorted(filter(_runs, children))}")
    return problems


async def _is_settled(client: Any) -> bool:
    return not await client.exists(keys.QUEUE) and not await client.keys("arq:*")


async def _within(seconds: float, condition: Callable[[], Any]) -> bool:
    end = time.monotonic() + seconds
    while not await condition():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.05)
    return True


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@contextmanager
def cluster(directory: Path, seed: int, *, proxied: bool = True) -> Iterator[Cluster]:
    """A cluster that is stopped at the end.

    Args:
        seed: half of the seeds record sessions with routed experts.
        proxied: as in `Cluster`.
    """
    tokenizer = small_tokenizer()
    tokenizer.chat_template = chat_template("qwen3_training")
    tokenizer.save_pretrained(directory / "tokenizer")
    replay = ("off", "incremental")[seed % 2]
    with ExitStack() as stack:
        # The workers' children import the hook.
        path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
        stack.enter_context(patch.dict(os.environ, {"PYTHONPATH": path}))
        valkey = stack.enter_context(EmbeddedValkey(directory / "data"))
        running = Fleet(valkey.url, "", directory / "tokenizer", directory)
        made = Cluster(valkey, running, seed, proxied=proxied)
        for proxy in made.all_proxies:
            stack.enter_context(proxy)
        stack.callback(running.stop)
        made.start(replay)
        yield made
