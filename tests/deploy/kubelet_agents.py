"""`python -m tests.deploy.kubelet_agents`: the fault suite's agents and driver, in a pod, until SIGTERM.

Half of them keep their connections, the others make a new one for each request. After SIGTERM they let the
episodes end and write what became of it, with times of this machine's monotonic clock.
"""

import asyncio
import pickle
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.faults.history import History
from tests.faults.workload import Workload, unbounded

PAUSE_S = 2.0
"""The most between two episodes of a player."""


@dataclass
class Played:
    """What the clients heard.

    Attributes:
        kept: of those that keep their connections.
        fresh: of the others.
        gave_up: the complaints of agents that got no answer in spite of all attempts.
    """

    kept: History = field(default_factory=History)
    fresh: History = field(default_factory=History)
    gave_up: list[str] = field(default_factory=list)


def unkept() -> httpx.AsyncBaseTransport:
    """A connection for each request."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncHTTPTransport(limits=limits, trust_env=False)


async def play(url: str, seed: int, players: int) -> Played:
    """Episodes until SIGTERM, `players` at a time with either kind of connection."""
    draw = random.Random(seed)
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    played = Played()

    async def player(workload: Workload) -> None:
        while not stopping.is_set():
            await asyncio.sleep(draw.uniform(0, PAUSE_S))
            try:
                await workload.episode("tree" if draw.random() < 0.4 else "linear")
            except AssertionError as error:
                played.gave_up.append(str(error))

    async with (
        Workload([url], played.kept, seed, network=unbounded) as keeping,
        Workload([url], played.fresh, seed + 1, network=unkept) as renewing,
        asyncio.TaskGroup() as group,
    ):
        for workload in (keeping, renewing):
            for _ in range(players):
                group.create_task(player(workload))
    return played


def main() -> None:
    url, seed, players, target = sys.argv[1:]
    played = asyncio.run(play(url, int(seed), int(players)))
    Path(target).write_bytes(pickle.dumps((played.kept, played.fresh, played.gave_up)))


if __name__ == "__main__":
    main()
