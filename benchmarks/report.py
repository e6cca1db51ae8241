"""Results: on the console, as files in `benchmarks/results/`, and all together in its README."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Measurement

RESULTS = Path(__file__).parent / "results"
PAGE = RESULTS / "README.md"

_HEAD = """# Results

The newest result of every figure that has a limit, with the commit and the date of its run; the files beside this page
have all figures and parameters. All were measured on one machine, with clients, engine and Redis on it too:
{machine}. It has neighbours: one short loop of Python took 17 ms of CPU in some seconds and 35 ms in
others, with nothing else running. Compare figures of one run. Its Python was built without profile-guided
optimization; with Debian's, which has it, a chat turn took 0.94 times as long (6 fresh processes of each, asked in
turn).
`make bench` runs the benchmarks and writes this page, and so do `make test-faults`, `make test-live`,
`make test-deploy`, `python -m benchmarks.topologies` and `python -m benchmarks.compare`, whose figures end in `_against`:
the ratio of two commits that ran in turn.

`chat_cpu_bare` and `chat_added_bare_p50` have no limit: they are what the packages alone (HTTP server, framework, HTTP
client, Redis client) take for the calls of a chat turn, with about as many bytes, without anything that Tokentape is
for (`benchmarks/bare.py`). {missed}

| Figure | Of | Value | Limit | | Commit, date |
|---|---|---|---|---|---|
"""  # noqa: E501
_STEPS = "deploy_step_"
"""The parts of figures that are here as a whole."""


def table(measurements: Sequence[Measurement]) -> str:
    """The measurements for a console."""
    rows = [
        (m.name, json.dumps(m.params), f"{m.value:.4g} {m.unit}", m.limit_text, m.verdict)
        for m in measurements
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def write(name: str, measurements: Sequence[Measurement]) -> None:
    """Keeps the measurements of one benchmark, with commit and machine, and renews the page."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    machine = {
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    content = {
        "benchmark": name,
        "commit": commit.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine,
        "measurements": [measurement.to_json() for measurement in measurements],
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    PAGE.write_text(page(read()))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def page(results: list[dict[str, Any]]) -> str:
    """The page.

    Args:
        results: the contents of the result files.
    """
    rows, missed = [], []
    for result in results:
        run = f"{result['commit'][:7]}, {result['date']}"
        for measured in map(Measurement.from_json, result["measurements"]):
            if not (measured.limit_text or "bare" in measured.name) or measured.name.startswith(_STEPS):
                continue
            if measured.met is False:
                missed.append(f"`{measured.name}`")
            verdict = "**missed**" if measured.met is False else measured.verdict
            value = f"{measured.value:.5g} {measured.unit}"
            cells = (
                f"`{measured.name}`",
                _params(measured.params),
                value,
                measured.limit_text,
                verdict,
                run,
            )
            rows.append(f"| {' | '.join(cells)} |")
    sentence = f"Limits that are missed: {', '.join(missed)}." if missed else "No limit is missed."
    return _HEAD.format(machine=_machine(results[-1]["machine"]), missed=sentence) + "\n".join(rows) + "\n"


def read() -> list[dict[str, Any]]:
    """The result files, by name."""
    return [json.loads(file.read_text()) for file in sorted(RESULTS.glob("*.json"))]


def _params(params: dict[str, Any]) -> str:
    told = (
        f"{name} {value:g}" if isinstance(value, float) else f"{name} {json.dumps(value)}"
        for name, value in params.items()
        if not isinstance(value, dict | str) or len(str(value)) < 40
    )
    return ", ".join(told).replace('"', "").replace("|", "/")


def _machine(machine: dict[str, Any]) -> str:
    return f"{machine['cpus']} CPUs ({machine['processor']}), Python {machine['python']}"
