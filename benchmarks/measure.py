"""Measurements, and the CPU time of process trees."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass(frozen=True)
class Measurement:
    """One figure, and the limit that it must keep, if there is one: at most, or at least, so much."""

    name: str
    value: float
    unit: str
    params: dict[str, Any] = field(default_factory=dict)
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool | None:
        if self.at_most is not None:
            return self.value <= self.at_most
        return None if self.at_least is None else self.value >= self.at_least

    @property
    def limit_text(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g} {self.unit}"
        return "" if self.at_least is None else f"≥ {self.at_least:g} {self.unit}"

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> "Measurement":
        """What `to_json` gave."""
        return cls(**{name: value for name, value in line.items() if name != "met"})

    def to_json(self) -> dict[str, Any]:
        line = {"name": self.name, "params": self.params, "value": round(self.value, 6), "unit": self.unit}
        limit = {"at_most": self.at_most, "at_least": self.at_least, "met": self.met}
        return {**line, **{name: value for name, value in limit.items() if value is not None}}


def cpu_seconds(*pids: int) -> float:
    """User and system time that these processes and their living children have used so far."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total
