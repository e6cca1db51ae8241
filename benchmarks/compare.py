"""`python -m benchmarks.compare REVISION NAME …`: benchmarks of HEAD against those of an earlier commit.

Both trees run in turn, each time in fresh processes, since the machine's speed changes by more between
minutes than a change of code does. Prints a line per measurement: both medians, and the median of the ratios
of neighbouring runs. Exit code 1 if a ratio is above `--most`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parents[1]
FOLDERS = (
    "contracts",
    "services/core",
    "services/api",
    "services/assembler",
    "services/cli",
    "services/engine",
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
    worst = 0.0
    print(f"| Measurement | {arguments.revision} | HEAD | ratio | of {arguments.runs} runs |")
    print("|---|---|---|---|---|")
    for key in runs[0][0].keys() & runs[0][1].keys():
        pairs = [(old[key], new[key]) for old, new in runs]
        ratios = sorted(new / old for old, new in pairs)
        old, new = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = statistics.median(ratios)
        print(
            f"| {' '.join(key)} | {old:.2f} | {new:.2f} | {ratio:.3f} | {ratios[0]:.3f} to {ratios[-1]:.3f} |"
        )
        worst = max(worst, 0.0 if "bare" in key[0] else ratio)
    return int(worst > arguments.most)


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
    return dict(_values(done.stdout))


def _values(output: str) -> Iterator[tuple[Key, float]]:
    for line in output.splitlines():
        found = json.loads(line)
        params = {name: value for name, value in found["params"].items() if name in ("turn", "turns")}
        yield (found["name"], json.dumps(params)), found["value"]


if __name__ == "__main__":
    sys.exit(main())
