"""What an assembly counted, on its way from the child process to the worker's metrics."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers about one assembly.

    Attributes:
        samples: status → samples.
        picked: leaves that were to become samples.
        dropped: the other leaves.
        tokens: fate (`accounting.FATES`) → sampled tokens of the session.
        mismatches: type → entries of `tito_session_mismatch`.
        lost: turns that the API acknowledged and the stream does not hold.
    """

    samples: Mapping[str, int] = field(default_factory=dict)
    picked: int = 0
    dropped: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    mismatches: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Counts":
        return cls(**fields)
