"""`python -m benchmarks.compare REVISION NAME …`: benchmarks of HEAD against those of an earlier commit.

Both trees run in turn, each time in fresh processes, since the machine's speed changes by more between
minutes than a change of code does. What is kept is, for each measurement, the median of the ratios of
neighbouring runs. The exit code is 1 if one is above `--most`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import report
from benchmarks.measure import Measurement

HERE = Path(__file__).parents[1]
FOLDERS = (
    "contracts",
    "services/core",
    "services/api",
    "services/assembler",
    "services/cli",
    "services/engine",
    "driver",
)
"""Where the packages lie in a tree; this interpreter has those of this tree installed."""

Key = tuple[str, str]
"""Name and parameters of a measurement."""


def main() -> int:
    """Compares, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revision", help="the commit to compare with")
    parser.add_argument("names", nargs="+", metavar="NAME", help="benchmarks; both trees must have them")
    parser.add_argument("--runs", type=int, default=5, help="runs of each tree (default: 5)")
    parser.add_argument("--most", type=float, default=1.03, help="the largest ratio that is fine")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        before, after = (stack.enter_context(_checked_out(commit)) for commit in (arguments.revision, "HEAD"))
        runs = [
            (_measure(before, arguments.names), _measure(after, arguments.names))
            for _ in range(arguments.runs)
        ]
    measurements = [
        _compared(key, [(old[key], new[key]) for old, new in runs], arguments) for key in runs[0][1]
    ]
    print(report.table(measurements))
    report.write("compare", measurements)
    return int(any(measurement.met is False for measurement in measurements))


def _compared(key: Key, pairs: Sequence[tuple[float, float]], arguments: argparse.Namespace) -> Measurement:
    name, params = key
    ratios = sorted(new / old for old, new in pairs)
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    told = {
        **json.loads(params),
        "before": arguments.revision[:7],
        "medians": [round(before, 3), round(after, 3)],
        "runs": len(pairs),
        "lowest": round(ratios[0], 3),
        "highest": round(ratios[-1], 3),
    }
    # What the packages alone take says how much of a ratio is the machine's.
    limit = None if "bare" in name else arguments.most
    return Measurement(f"{name}_against", statistics.median(ratios), "x", told, limit)


@contextmanager
def _checked_out(commit: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=HERE, check=True)
        try:
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=HERE, check=True)


def _measure(tree: Path, names: list[str]) -> dict[Key, float]:
    """Runs the benchmarks of a tree."""
    environment = {**os.environ, "PYTHONPATH": ":".join(str(tree / folder) for folder in FOLDERS)}
    command = [sys.executable, "-m", "benchmarks", *names]
    # The exit code says whether limits are met, which is not asked here.
    done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    found = dict(_values(done.stdout))
    if not found:
        raise RuntimeError(f"{' '.join(names)} measured nothing in {tree}; the message is above")
    return found


def _values(output: str) -> Iterator[tuple[Key, float]]:
    for line in output.splitlines():
        found = json.loads(line)
        params = {name: value for name, value in found["params"].items() if name in ("turn", "turns")}
        yield (found["name"], json.dumps(params)), found["value"]


if __name__ == "__main__":
    sys.exit(main())
