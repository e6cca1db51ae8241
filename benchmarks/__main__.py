"""`python -m benchmarks [NAME …]`: runs benchmarks, prints one JSON line per measurement and a table.

The results, with commit and machine, also go to `benchmarks/results/`. Every benchmark asks one question, has
a seed and a bounded load, and reports medians; CPU time rather than wall time wherever that answers it.
Without names all are run but `live`, which is a test too: `make test-live`.
"""

import json
import sys
from collections.abc import Callable, Iterator

from benchmarks import report
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
        print(report.table(measurements), file=sys.stderr)
        report.write(name, measurements)
        failed |= any(measurement.met is False for measurement in measurements)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
