"""Sampled tokens that no sample trains: what is said about them, and whether that is an error."""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from tokentape_contracts.accounting import Accounting, LeftOut, Reason
from tokentape_contracts.errors import InvalidRequest
from tokentape_driver.errors import TokensLeftOut, ensure_choice

logger = logging.getLogger("tokentape.driver")

OnLeftOut = Literal["warn", "raise", "ignore"]
"""What to do if sampled tokens are left out: log one warning, raise `TokensLeftOut`, or nothing."""

IGNORED: Final = frozenset[str]({Reason.TRIMMED})
"""What does not matter unless told otherwise. Some families' templates write each turn's stop token anew."""
_GROUPS_SHOWN: Final = 8
"""How many groups of turns a text names; a session may hold a thousand turns."""


@dataclass(frozen=True, slots=True)
class LeftOutRule:
    """What the caller wants to happen, unless the reason is one of the ignored."""

    action: OnLeftOut
    ignored: frozenset[str]

    @property
    def reasons(self) -> frozenset[Reason]:
        """The reasons of this version that are not ignored."""
        return frozenset(Reason) - self.ignored

    def apply(self, session_id: str, accounting: Accounting | None) -> None:
        """Warns or raises if tokens were left out for one of the reasons; not for a server that counts none.

        Raises:
            TokensLeftOut: some were, and the action is `raise`.
        """
        if accounting is None or self.action == "ignore":
            return
        left_out = [entry for entry in accounting.left_out if entry.reason not in self.ignored]
        if not left_out:
            return
        text = describe(session_id, accounting.sampled_tokens, left_out)
        if self.action == "raise":
            raise TokensLeftOut(text, accounting=accounting, session_id=session_id)
        logger.warning("%s", text)


def left_out_rule(on_left_out: str, reasons: Collection[str] | None) -> LeftOutRule:
    """The rule that these arguments make.

    Args:
        on_left_out: one of `OnLeftOut`.
        reasons: values of `Reason`; None for all but `trimmed`.

    Raises:
        InvalidRequest: names the argument that is none of these.
    """
    ensure_choice("on_left_out", on_left_out, get_args(OnLeftOut))
    action: Any = on_left_out
    if reasons is None:
        return LeftOutRule(action, IGNORED)
    try:
        # The characters of a lone text are no reasons either.
        return LeftOutRule(action, frozenset(Reason) - {Reason(reason) for reason in reasons})
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"reasons must be a collection of {', '.join(Reason)}, not {reasons!r}"
        ) from error


def describe(session_id: str, sampled_tokens: int, left_out: Sequence[LeftOut]) -> str:
    """One sentence about the entries: how many tokens, of which turns, and why; its length is bounded."""
    tokens = sum(entry.tokens for entry in left_out)
    groups = list(_groups(left_out))
    named = [_group_text(group) for group in groups[:_GROUPS_SHOWN]]
    if rest := [entry for group in groups[_GROUPS_SHOWN:] for entry in group]:
        named.append(
            f"and {sum(entry.tokens for entry in rest):,} of turns {rest[0].turn} to {rest[-1].turn}"
        )
    return (
        f"session {session_id}: {tokens:,} of {sampled_tokens:,} sampled tokens are not trained: "
        f'{", ".join(named)}; see "Where did my tokens go?" in the docs'
    )


def _groups(left_out: Sequence[LeftOut]) -> Iterator[list[LeftOut]]:
    """Entries of neighbouring turns with the same reason, together."""
    group: list[LeftOut] = []
    for entry in left_out:
        if group and not _are_neighbours(group[-1], entry):
            yield group
            group = []
        group.append(entry)
    if group:
        yield group


def _are_neighbours(before: LeftOut, after: LeftOut) -> bool:
    return (before.turn + 1, before.reason, before.by) == (after.turn, after.reason, after.by)


def _group_text(group: Sequence[LeftOut]) -> str:
    first, last = group[0], group[-1]
    turns = f"turn {first.turn}" if len(group) == 1 else f"turns {first.turn}-{last.turn}"
    by = "" if first.by is None else f" by turn {first.by}"
    return f"{turns} ({sum(entry.tokens for entry in group):,}, {first.reason}{by})"
