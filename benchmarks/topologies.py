"""`python -m benchmarks.topologies`: what a failover loses, and what moving a large session costs.

Real servers on loopback: a primary with two replicas and three Sentinels, and a cluster of three nodes. The
results are `benchmarks/results/sentinel.json` and `benchmarks/results/cluster_move.json`.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from redis.crc import key_slot

from benchmarks.measure import Measurement
from benchmarks.report import write
from tests.support.topologies import Server, cluster
from tests.topologies.failover import MIN_REPLICAS, Fault, Outcome, fail_over
from tokentape_contracts import keys, limits

RUNS = 5
NODE_TIMEOUT_MS = 15_000
"""As servers have it by default."""
LARGE_BYTES = 100 * limits.MiB


class Setting(NamedTuple):
    """One way to run the servers and the store, and one way to lose the primary."""

    fault: Fault
    lag_ms: int
    min_replicas: bool
    wait_replicas: int
    down_after_ms: int = 2_000


FAULTS: list[tuple[Fault, int]] = [("killed", 0), ("killed", 20), ("isolated", 0)]
SETTINGS = [
    Setting(fault, lag_ms, min_replicas, wait_replicas)
    for fault, lag_ms in FAULTS
    for min_replicas, wait_replicas in ((False, 0), (True, 0), (False, 1))
] + [Setting("isolated", 0, min_replicas=False, wait_replicas=1, down_after_ms=600)]
"""The last one may be too quick for Sentinels to know which replica is the most advanced."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    runs = parser.parse_args().runs
    write("cluster_move", list(cluster_move(runs)))
    write("sentinel", list(sentinel(runs)))
    return 0


def sentinel(runs: int) -> Iterator[Measurement]:
    """How many acknowledged turns does a failover lose, by what was set?"""
    for setting in SETTINGS:
        params = {**setting._asdict(), "runs": runs}
        outcomes = [_fail_over(setting) for _ in range(runs)]
        found = [one.found for one in outcomes]
        print(setting, [(one.lost, one.acknowledged) for one in found], flush=True)
        never = 0.0 if setting.wait_replicas and setting.down_after_ms > 1_000 else None
        yield Measurement("sentinel_acknowledged", sum(one.acknowledged for one in found), "turns", params)
        yield Measurement("sentinel_lost", sum(one.lost for one in found), "turns", params, at_most=never)
        yield Measurement("sentinel_lost_most_in_a_run", max(one.lost for one in found), "turns", params)
        yield Measurement("sentinel_doubled", sum(one.doubled for one in found), "turns", params, at_most=0.0)
        yield Measurement("sentinel_refused", sum(one.refused for one in outcomes), "appends", params)
        append_ms = median(one.median_s for one in outcomes) * 1000
        yield Measurement("sentinel_append", append_ms, "ms", params)
        yield Measurement("sentinel_outage", median(one.slowest_s for one in outcomes), "s", params)


def _fail_over(setting: Setting) -> Outcome:
    lines = MIN_REPLICAS if setting.min_replicas else ()
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(
            fail_over(
                Path(directory),
                setting.fault,
                lag_s=setting.lag_ms / 1000,
                lines=lines,
                wait_replicas=setting.wait_replicas,
                down_after_ms=setting.down_after_ms,
            )
        )


def cluster_move(runs: int) -> Iterator[Measurement]:
    """How long does a session with 100 MiB of routing replay rows take to move, and others wait?"""
    with (
        tempfile.TemporaryDirectory() as directory,
        cluster(Path(directory), node_timeout_ms=NODE_TIMEOUT_MS) as nodes,
    ):
        key = keys.blobs("large")
        slot = key_slot(key.encode())
        source = nodes.owner(slot)
        target = next(node for node in nodes.nodes if node is not source)
        with source.admin as admin:
            for part in range(LARGE_BYTES // limits.STORE_VALUE_BYTES):
                admin.hset(key, str(part), os.urandom(limits.STORE_VALUE_BYTES))
        moves: dict[str, Callable[[Server, Server], None]] = {
            "MIGRATE": lambda here, there: nodes.move(slot, here, there),
            "MIGRATESLOTS": lambda here, there: nodes.move_atomically(slot, slot, here, there),
        }
        for name, move in moves.items():
            times, waits = [], []
            for _ in range(runs):
                with Waits([source, target]) as waiting:
                    began = time.monotonic()
                    move(source, target)
                    times.append(time.monotonic() - began)
                waits.append(waiting.longest)
                source, target = target, source
            params = {"by": name, "bytes": LARGE_BYTES, "parts_bytes": limits.STORE_VALUE_BYTES, "runs": runs}
            yield Measurement("cluster_move", median(times), "s", params)
            yield Measurement("cluster_move_others_wait", median(waits), "s", params)


class Waits:
    """The longest time that a PING to any of these servers took while the block lasted."""

    def __init__(self, servers: list[Server]) -> None:
        self.longest = 0.0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ping, args=(server,)) for server in servers]

    def __enter__(self) -> "Waits":
        for thread in self._threads:
            thread.start()
        time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ping(self, server: Server) -> None:
        with server.admin as admin:
            while not self._stop.is_set():
                began = time.monotonic()
                admin.ping()
                self.longest = max(self.longest, time.monotonic() - began)
                time.sleep(0.001)


if __name__ == "__main__":
    sys.exit(main())
