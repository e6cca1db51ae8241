"""Prometheus metrics with closed label sets.

Every value that a label may have is named when the metric is made. So each series is there from the start, at
0, a scrape never grows, and nothing that a client sends can become a label.
"""

import asyncio
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any, Final, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `expose` gives."""

SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    120.0,
    600.0,
)
"""Buckets from a render to the longest generation."""
LAGS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Buckets of an event loop's lag."""
_SAMPLE_S: Final = 0.1

# When a series began is of no use where all begin with the process.
disable_created_metrics()  # type: ignore[no-untyped-call]

Family = TypeVar("Family", Counter, Gauge, Histogram)


class Meter:
    """Makes the metrics of one process, in a registry of their own.

    A method with labels gives label value → series, or for two labels `(value, value)` → series.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def counters(self, name: str, text: str, **labels: Iterable[str]) -> Mapping[Any, Counter]:
        return _series(Counter(name, text, tuple(labels), registry=self.registry), labels)

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def histograms(self, name: str, text: str, **labels: Iterable[str]) -> Mapping[Any, Histogram]:
        return _series(Histogram(name, text, tuple(labels), buckets=SECONDS, registry=self.registry), labels)

    def build_info(self) -> None:
        """`tokentape_build_info`: 1, with the version as its label."""
        try:
            installed = version("tokentape")
        except PackageNotFoundError:
            installed = "unknown"
        family = Gauge(
            "tokentape_build_info", "Always 1; says the version.", ("version",), registry=self.registry
        )
        family.labels(installed).set(1)

    def expose(self) -> bytes:
        """All series in Prometheus's text format. Takes milliseconds: for a thread."""
        return generate_latest(self.registry)


def _series(family: Family, labels: Mapping[str, Iterable[str]]) -> Mapping[Any, Family]:
    combinations = product(*labels.values())
    return {(values if len(values) > 1 else values[0]): family.labels(*values) for values in combinations}


async def observe_lag(histogram: Histogram) -> None:
    """Observes for ever how late the event loop wakes a sleeper."""
    now = asyncio.get_running_loop().time
    while True:
        due = now() + _SAMPLE_S
        await asyncio.sleep(_SAMPLE_S)
        histogram.observe(max(0.0, now() - due))
