"""Where a session's sampled tokens are: trained in one place of its samples, or left out, and why (INV-11).

Every samples reply and `GET /sessions/{sid}` carry it as `session_metadata.accounting`:

    {"generations": 3, "sampled_tokens": 91, "trained_tokens": 79,
     "left_out": [{"turn": 2, "tokens": 12, "reason": "retried", "by": 3}]}

`sampled_tokens = trained_tokens + Σ left_out.tokens` always. An object that breaks this cannot be made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final


class Reason(StrEnum):
    """Why sampled tokens are in no sample, or are not trained there."""

    RETRIED = "retried"
    """Another turn had the same input and took its place; it is `by`."""
    REVISED = "revised"
    """A linear session went on with another turn instead; it is `by`."""
    NOT_PICKED = "not_picked"
    """The pick hook kept no leaf below the turn."""
    MASKED_BY_HOOK = "masked_by_hook"
    """They are in a sample, and the finish hook masked them."""
    OVER_MAX_SEQ_LEN = "over_max_seq_len"
    """They lie beyond the request's `max_seq_len`."""
    AFTER_CUT = "after_cut"
    """They follow a turn that did not complete, with which the sample ends."""
    REPLAY_ROWS_MISSING = "replay_rows_missing"
    """The engine sent no routing replay rows for the turn, although it had for the one before."""
    TRIMMED = "trimmed"
    """The prompt of the next turn did not keep them: a stop token for which the template writes another."""


TRAINED: Final = "trained"
"""The fate of a token that no reason keeps out."""
FATES: Final[tuple[str, ...]] = (TRAINED, *(reason.value for reason in Reason))
"""All that can become of a sampled token."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Sampled tokens of one turn that are not trained.

    Attributes:
        turn: the turn's seq, from 1.
        tokens: how many, at least 1.
        reason: why, one of `Reason`; a newer server may name others.
        by: the seq of the turn that took its place, if the reason has one.
    """

    turn: int
    tokens: int
    reason: str
    by: int | None = None


@dataclass(frozen=True, slots=True)
class Accounting:
    """What became of every token that was sampled in a session.

    Attributes:
        generations: turns.
        sampled_tokens: output tokens of all turns.
        trained_tokens: tokens with loss mask 1, over all samples.
        left_out: the others, in the order of their turns.

    Raises:
        ValueError: the tokens do not add up, or a number is not one.
    """

    generations: int
    sampled_tokens: int
    trained_tokens: int
    left_out: Sequence[LeftOut] = ()

    def __post_init__(self) -> None:
        left_out = sum(entry.tokens for entry in self.left_out)
        if self.sampled_tokens != self.trained_tokens + left_out:
            raise ValueError(
                f"{self.sampled_tokens} tokens were sampled, but {self.trained_tokens} are trained and "
                f"{left_out} left out"
            )
        if self.trained_tokens < 0 or any(entry.tokens < 1 for entry in self.left_out):
            raise ValueError("a number of tokens is below 0, or an entry of left_out names none")

    @property
    def fates(self) -> dict[str, int]:
        """One of `FATES` → how many tokens had it; without those that none had."""
        counts = {TRAINED: self.trained_tokens}
        for entry in self.left_out:
            counts[entry.reason] = counts.get(entry.reason, 0) + entry.tokens
        return {str(fate): count for fate, count in counts.items() if count}

    def to_json(self) -> dict[str, Any]:
        """As it stands in the session's metadata."""
        return {
            "generations": self.generations,
            "sampled_tokens": self.sampled_tokens,
            "trained_tokens": self.trained_tokens,
            "left_out": [asdict(entry) for entry in self.left_out],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Accounting":
        """Reads what `to_json` wrote; unknown keys are left to newer versions.

        Raises:
            ValueError: a field is missing or of a wrong type, or the tokens do not add up.
        """
        try:
            entries = [
                LeftOut(
                    _count(entry["turn"]),
                    _count(entry["tokens"]),
                    _reason(entry["reason"]),
                    None if entry["by"] is None else _count(entry["by"]),
                )
                for entry in fields["left_out"]
            ]
            return cls(
                _count(fields["generations"]),
                _count(fields["sampled_tokens"]),
                _count(fields["trained_tokens"]),
                entries,
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an accounting: {type(error).__name__}: {error}") from error


def _reason(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a reason")
    return Reason(value) if value in FATES[1:] else value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a number of tokens or turns")
    return value
