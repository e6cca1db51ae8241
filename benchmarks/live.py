"""Many sessions at the same time, checked against what every client was told."""

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.measure import Measurement
from tests.faults.cluster import APIS, WORKERS, cluster
from tests.faults.history import Kind
from tests.faults.live import Lived
from tests.faults.live import live as play

SESSIONS, TURNS = 500, 20
THINK_S = 8.0
"""So that 500 agents ask for some 60 turns a second: two cores can bear that, clients and engine included."""
LIMIT_S = 360.0
QUANTILES = (50, 90, 99)


def live() -> Iterator[Measurement]:
    """Do 500 living sessions with 20 turns each get right answers only, and how long do these take?"""
    seed = random.SystemRandom().randrange(2**31)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory, cluster(Path(directory), seed, proxied=False) as running:
        lived = asyncio.run(
            play(running, seed, sessions=SESSIONS, turns=TURNS, think_s=THINK_S, limit_s=LIMIT_S)
        )
    for problem in (*lived.report.problems, *map(str, lived.failed)):
        print(f"WRONG: {problem}", file=sys.stderr)
    seconds = time.monotonic() - began
    params = {
        "sessions": SESSIONS,
        "turns": TURNS,
        "think_s": THINK_S,
        "apis": APIS,
        "workers": WORKERS,
        "seed": seed,
    }
    turns = float(lived.report.acknowledged)
    yield Measurement("live_sessions_at_once", lived.live, "sessions", params, at_least=SESSIONS)
    yield Measurement("live_turns", turns, "turns", at_least=SESSIONS * TURNS)
    yield Measurement("live_collects", lived.report.collects, "collects", at_least=SESSIONS)
    yield Measurement("live_errors", len(lived.failed), "requests", at_most=0.0)
    yield Measurement("live_violations", len(lived.report.problems), "violations", at_most=0.0)
    yield Measurement("live_turns_per_second", turns / lived.seconds, "1/s")
    yield from _latencies(lived, "chat")
    yield from _latencies(lived, "collect")
    for number, resident in enumerate(lived.resident_bytes):
        yield Measurement("live_api_resident", resident / 2**20, "MiB", {"api": number})
    yield Measurement("live_seconds", seconds, "s")


def _latencies(lived: Lived, kind: Kind) -> Iterator[Measurement]:
    """From the request to the end of its answer; a chat's has 5 to 60 ms of the engine."""
    times = sorted((call.ended - call.began) * 1000 for call in lived.history.of(kind) if call.ok)
    for quantile in QUANTILES:
        yield Measurement(f"live_{kind}_latency_p{quantile}", _quantile(times, quantile), "ms")


def _quantile(times: Sequence[float], percent: int) -> float:
    return times[min(len(times) * percent // 100, len(times) - 1)] if times else float("inf")
