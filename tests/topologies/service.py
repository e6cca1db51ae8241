"""The whole service, two API processes and two workers, wherever its Redis is."""

import random
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.checker import Report, check, read_all
from tests.faults.history import History
from tests.faults.workload import Workload
from tests.support.processes import Fleet, fleet, wait_for
from tokentape_cli.processes import free_port
from tokentape_core.store import connect
from tokentape_core.text.families import get_family
from tokentape_core.text.render import ChatRenderer
from tokentape_core.text.tokenizer import Tokenizer

APIS = WORKERS = 2


@dataclass
class Service:
    """Processes that run.

    Attributes:
        fleet: all of them.
        urls: of the API processes.
        redis_url: where the sessions are.
    """

    fleet: Fleet
    urls: list[str]
    redis_url: str

    @asynccontextmanager
    async def load(self, episodes: int, *, allowed: Collection[str] = ()) -> AsyncIterator[Report]:
        """Plays episodes while the block lasts, and then checks what the clients were told.

        Args:
            allowed: codes of refusals that the block's faults explain.
        """
        history, report = History(), Report()
        async with Workload(self.urls, history, random.randrange(2**32)).running(episodes):
            yield report
        client = connect(self.redis_url)
        try:
            recorded = await read_all(client, history.sessions)
        finally:
            await client.aclose()
        tokenizer = Tokenizer.load(str(self.fleet.tokenizer))
        renderer = ChatRenderer(tokenizer, get_family(self.fleet.family))
        found = await check(history, recorded, tokenizer.decode, renderer, allowed=allowed)
        vars(report).update(vars(found))
        print(report)


@contextmanager
def service(
    directory: Path, tokenizer: Path, redis_url: str, queue_url: str, *more: str
) -> Iterator[Service]:
    """The service, which is stopped at the end.

    Args:
        more: arguments of the API processes.
    """
    port = free_port()
    queue = ("--queue-redis-url", queue_url)
    with fleet(redis_url, f"http://127.0.0.1:{port}", tokenizer, directory) as running:
        (end,) = Tokenizer.load(str(tokenizer)).encode("<|im_end|>")
        arguments = ("--port", str(port), "--end", str(end), "--seed", "0", "--first", "0")
        engine = running.start("engine", "tests.faults.engine", *arguments)
        wait_for(f"{running.engine_url}/health", engine)
        urls = [running.api(*queue, *more)[1] for _ in range(APIS)]
        for _ in range(WORKERS):
            running.assembler(*queue)
        yield Service(running, urls, redis_url)
