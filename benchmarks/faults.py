"""`python -m benchmarks.faults`: does the fault suite hold, time after time?

Runs `tests/faults` with one seed after the other, stops at the first failure and prints its seed, and
otherwise writes what was acknowledged, injected, lost and doubled to `benchmarks/results/faults.json`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement
from benchmarks.report import write

RUNS = 20
PROCESSES = 2
RUN_TIMEOUT_S = 900
FIGURES = {"acknowledged": "turns", "unclear": "turns", "collects": "collects"}
NONE = {"lost": "turns", "doubled": "turns"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; the next ones follow it")
    options = parser.parse_args()
    first = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    runs: list[dict[str, Any]] = []
    for seed in range(first, first + options.runs):
        began = time.monotonic()
        figures = run(seed)
        if figures is None:
            print(f"run {len(runs) + 1} of {options.runs} failed: FAULT_SEED={seed}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - began
        runs.append({**figures, "seconds": seconds})
        print(f"run {len(runs)} of {options.runs}: seed {seed}, {seconds:.0f} s, {figures}", flush=True)
    write("faults", list(measurements(runs)))
    return 0


def run(seed: int) -> dict[str, Any] | None:
    """One run of the suite; None if it failed."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {**os.environ, "FAULT_SEED": str(seed), "FAULT_FIGURES": directory}
        # Most of a run is waiting: for leases, deadlines, servers that come back.
        spread = ("-n", str(PROCESSES), "--dist", "loadfile")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *spread, "tests/faults"]
        try:
            ended = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=RUN_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            print(f"the run took longer than {RUN_TIMEOUT_S} s", file=sys.stderr)
            return None
        if ended.returncode != 0:
            print(ended.stdout + ended.stderr, file=sys.stderr)
            return None
        return added(seed, [json.loads(file.read_text()) for file in Path(directory).glob("*.json")])


def added(seed: int, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run from those of its processes."""
    faults: Counter[str] = Counter()
    for one in figures:
        faults.update(one["faults"])
    sums = {name: sum(one[name] for one in figures) for name in (*FIGURES, *NONE)}
    return {"seed": seed, **sums, "faults": dict(faults)}


def measurements(runs: list[dict[str, Any]]) -> Iterator[Measurement]:
    """Sums over all runs."""
    params = {"runs": len(runs), "seeds": [one["seed"] for one in runs]}
    yield Measurement("faults_runs_passed", len(runs), "runs", params)
    for name, unit in FIGURES.items():
        yield Measurement(f"faults_{name}", sum(one[name] for one in runs), unit)
    for name, unit in NONE.items():
        yield Measurement(f"faults_{name}", sum(one[name] for one in runs), unit, at_most=0.0)
    injected: Counter[str] = Counter()
    for one in runs:
        injected.update(one["faults"])
    yield Measurement("faults_injected", injected.total(), "faults")
    for kind, count in sorted(injected.items()):
        yield Measurement("faults_injected", count, "faults", {"kind": kind})
    seconds = sorted(one["seconds"] for one in runs)
    yield Measurement("faults_seconds_median", seconds[len(seconds) // 2], "s")


if __name__ == "__main__":
    sys.exit(main())
