"""Many sessions that live at the same time, on a deployment that nothing is done to."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
import httpx
import psutil
from httpx_aiohttp import AiohttpTransport

from tests.faults.checker import Report
from tests.faults.cluster import Cluster
from tests.faults.history import Call, History
from tests.faults.workload import Message, Workload
from tokentape_driver.session import Session

CALL_S: Final = 60.0
"""Any request's deadline: on a slow machine each waits for many others."""
_SAMPLE_S: Final = 0.2
_WORDS: Final = 40
"""Of an agent's message."""


@dataclass(frozen=True, slots=True)
class Lived:
    """What became of it.

    Attributes:
        history, report: of all clients, and what the checker says of it.
        failed: requests that were not answered, or with an error.
        live: sessions that had a turn, and had not ended, when the first one was deleted.
        seconds: from the first turn to the last DELETE.
        resident_bytes: the most that each API process held.
    """

    history: History
    report: Report
    failed: Sequence[Call]
    live: int
    seconds: float
    resident_bytes: Sequence[int]


async def live(
    cluster: Cluster, seed: int, *, sessions: int, turns: int, think_s: float, limit_s: float
) -> Lived:
    """Opens all sessions, and only then plays their turns; each is collected and deleted after its last one.

    One session in five is a tree, one agent in four streams, and one session in five is collected in the
    middle too. The driver opens and ends them.

    Args:
        think_s: how long an agent thinks, or waits for its tools, before a turn, on average.

    Raises:
        TimeoutError: it took longer than `limit_s`, the checker's work included.
    """
    draw = random.Random(seed)
    history = History()
    resident = [0] * len(cluster.apis)
    async with (
        asyncio.timeout(limit_s),
        Workload(cluster.urls, history, seed, call_s=CALL_S, network=_network) as workload,
    ):

        async def play(number: int, session: Session) -> None:
            collect_after = draw.randrange(turns) if number % 5 == 1 else None
            messages: list[Message] = []
            continues = ""
            for turn in range(turns):
                await asyncio.sleep(draw.uniform(0.0, 2.0) * think_s)
                text = f"{session.id} {turn} " + "word " * _WORDS
                messages = [*messages, {"role": "user", "content": text}]
                call, answer = await workload.turn(session.id, messages, continues, number % 4 == 0)
                messages, continues = [*messages, answer], call.response_id
                if turn == collect_after:
                    await workload.collect(session.id)
            await workload.driver.collect(session)

        watching = asyncio.create_task(_watch(cluster, resident))
        try:
            modes = ["tree" if number % 5 == 0 else "linear" for number in range(sessions)]
            opened = await asyncio.gather(*map(workload.open_by_driver, modes))
            began = time.monotonic()
            await asyncio.gather(*(play(number, session) for number, session in enumerate(opened)))
            seconds = time.monotonic() - began
        finally:
            watching.cancel()
        report = await cluster.examine(history)
    failed = [call for call in history.calls if not call.ok]
    first_end = min(call.began for call in history.of("delete"))
    alive = {call.session for call in history.of("chat") if call.ok and call.ended < first_end}
    return Lived(history, report, failed, len(alive), seconds, resident)


def _network() -> httpx.AsyncBaseTransport:
    """Without httpx's own pool, which with hundreds of connections costs more than all that is measured."""

    def session() -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    return AiohttpTransport(client=session)


async def _watch(cluster: Cluster, resident: list[int]) -> None:
    """Keeps the most that each API process has held."""
    apis = [psutil.Process(api.process.pid) for api in cluster.apis]
    while True:
        for number, api in enumerate(apis):
            resident[number] = max(resident[number], api.memory_info().rss)
        await asyncio.sleep(_SAMPLE_S)
