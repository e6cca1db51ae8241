"""One deployment for the whole folder, a seed that is printed, and figures for the benchmark's results."""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster, cluster

_DRAW = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
SEED = int(os.environ.get("FAULT_SEED") or _DRAW.randrange(2**31))
"""One for all processes of a run, whether they inherit it from the one that prints the header or not."""
os.environ["FAULT_SEED"] = str(SEED)
FIGURES = os.environ.get("FAULT_FIGURES")
"""A folder that gets the figures of each process of this run, for `benchmarks.faults`."""


def pytest_report_header() -> str:
    return f"faults: FAULT_SEED={SEED}"


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The deployment. It is mended after every test, not started anew."""
    directory = tmp_path_factory.mktemp("faults")
    with cluster(directory, SEED) as running:
        yield running
    if FIGURES:
        total = running.total
        figures = {
            "seed": SEED,
            "acknowledged": total.acknowledged,
            "unclear": total.unclear,
            "collects": total.collects,
            "lost": total.lost,
            "doubled": total.doubled,
            "faults": dict(running.faults),
        }
        Path(FIGURES, f"{os.getpid()}.json").write_text(json.dumps(figures))


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """The randomness of one test."""
    print("FAULT_SEED", SEED)
    return random.Random(f"{SEED} {request.node.name}")


@pytest.fixture
def sound(system: Cluster) -> Cluster:
    """The deployment with all its processes."""
    system.heal()
    return system
