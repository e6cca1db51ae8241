"""Measurements, and the CPU time of process trees."""

from dataclasses import dataclass, field
from typing import Any

import psutil


@dataclass(frozen=True)
class Measurement:
    """One figure, and the limit that it must keep, if there is one."""

    name: str
    value: float
    unit: str
    params: dict[str, Any] = field(default_factory=dict)
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.at_most is None else self.value <= self.at_most

    @property
    def limit_text(self) -> str:
        return "" if self.at_most is None else f"≤ {self.at_most:g} {self.unit}"

    @property
    def verdict(self) -> str:
        return {None: "", True: "met", False: "MISSED"}[self.met]

    def to_json(self) -> dict[str, Any]:
        line = {"name": self.name, "params": self.params, "value": round(self.value, 6), "unit": self.unit}
        return line if self.at_most is None else {**line, "at_most": self.at_most, "met": self.met}


def cpu_seconds(*pids: int) -> float:
    """User and system time that these processes and their living children have used so far."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
    return total
