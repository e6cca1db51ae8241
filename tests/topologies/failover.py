"""A primary that is lost under load, and what becomes of the turns that were acknowledged."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal
from uuid import uuid4

from tests.support.links import Links
from tests.support.topologies import sentinels, within
from tests.topologies.writers import Found, Writers, found
from tokentape_core.store import RedisStore, connect

Fault = Literal["killed", "isolated"]
MIN_REPLICAS: Sequence[str] = ("min-replicas-to-write 1", "min-replicas-max-lag 1")
_ISOLATED_S = 6.0


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        found: what is there afterwards.
        refused: appends that were not acknowledged.
        median_s, slowest_s: of the acknowledged appends.
    """

    found: Found
    refused: int
    median_s: float
    slowest_s: float


async def fail_over(
    directory: Path,
    fault: Fault,
    *,
    lag_s: float = 0.0,
    lines: Sequence[str] = (),
    wait_replicas: int = 0,
    down_after_ms: int = 2_000,
    sessions: int = 8,
    pause_s: float = 0.002,
) -> Outcome:
    """Loses the primary in one way, waits for the next, and counts.

    Args:
        fault: `killed` (SIGKILL), or `isolated` from replicas and Sentinels but not from clients, and joined
            again after `_ISOLATED_S`.
        lag_s: of the replicas behind the primary.
        lines: of the servers' configuration.
        down_after_ms: see `sentinels`.
    """
    with (
        Links() as links,
        sentinels(directory, announced=links.port, down_after_ms=down_after_ms, lines=lines) as made,
    ):
        links.lag_s = lag_s
        clients = [connect(made.url()) for _ in range(3)]
        writers = Writers(
            [RedisStore(client, wait_replicas=wait_replicas) for client in clients],
            [uuid4().hex for _ in range(sessions)],
            pause_s,
        )
        async with writers.running():
            await asyncio.sleep(1.0)
            first = made.primary
            if fault == "killed":
                first.kill()
            else:
                links.isolate(first.port)
            await asyncio.to_thread(within, 20, lambda: made.primary is not first)
            await asyncio.sleep(_ISOLATED_S if fault == "isolated" else 3.0)
            links.join(first.port)
            await asyncio.sleep(3.0)
        for client in clients:
            await client.aclose()
        reader = connect(made.url())
        result = await found(reader, writers)
        await reader.aclose()
    return Outcome(result, len(writers.errors), median(writers.times), max(writers.times))
