"""`python -m benchmarks [NAME …]`: runs benchmarks, prints one JSON line per measurement and a table.

The results, with commit and machine, also go to `benchmarks/results/`. Every benchmark asks one question, has
a seed and a bounded load, and reports medians; CPU time rather than wall time wherever that answers it.
Without names all are run but `live`, which is a test too: `make test-live`.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.chat import chat_added, chat_cpu
from benchmarks.collect import collect_cpu, collect_latency, collect_throughput
from benchmarks.live import live
from benchmarks.measure import Measurement
from benchmarks.replay import replay_bytes
from benchmarks.stall import loop_stall, replay_stall
from benchmarks.storage import live_sessions, reply_bytes, store_bytes

BENCHMARKS: dict[str, Callable[[], Iterator[Measurement]]] = {
    "collect_cpu": collect_cpu,
    "loop_stall": loop_stall,
    "replay_stall": replay_stall,
    "chat_cpu": chat_cpu,
    "chat_added": chat_added,
    "store_bytes": store_bytes,
    "replay_bytes": replay_bytes,
    "reply_bytes": reply_bytes,
    "collect_latency": collect_latency,
    "collect_throughput": collect_throughput,
    "live_sessions": live_sessions,
    "live": live,
}
ON_REQUEST = frozenset({"live"})
RESULTS = Path(__file__).parent / "results"


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in BENCHMARKS]:
        print(f"no benchmark {unknown[0]!r}; there are: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    failed = False
    for name in names or [name for name in BENCHMARKS if name not in ON_REQUEST]:
        question, _, _ = (BENCHMARKS[name].__doc__ or "").partition("\n")
        print(f"# {name}: {question}", file=sys.stderr)
        measurements = []
        for measurement in BENCHMARKS[name]():
            print(json.dumps(measurement.to_json()), flush=True)
            measurements.append(measurement)
        print(_table(measurements), file=sys.stderr)
        _write(name, measurements)
        failed |= any(measurement.met is False for measurement in measurements)
    return int(failed)


def _table(measurements: list[Measurement]) -> str:
    rows = [
        (m.name, json.dumps(m.params), f"{m.value:.4g} {m.unit}", m.limit_text, m.verdict)
        for m in measurements
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _write(name: str, measurements: list[Measurement]) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    machine = {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    content = {
        "benchmark": name,
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "measurements": [measurement.to_json() for measurement in measurements],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
