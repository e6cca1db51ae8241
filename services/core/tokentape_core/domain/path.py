"""A path of turns becomes one training sample, and nothing that was sampled on it goes unnamed.

Three passes over the turns of a path plan the sample:

1. *Cut.* What the next turn's prompt did not keep of a turn's output (at most `max_trim_tokens`, a stop token
   that the template renders again) is taken from that output, so that no token counts twice.
2. *Truncate*, turn by turn and before merging: the first turn above `max_seq_len` loses output from its end;
   if its prompt alone does not fit it is dropped; later turns are dropped.
3. *Merge* while the turn before is `completed` and no turn lacks routing replay rows that the one before had.
   Tokens between two outputs came from the environment: loss mask 0, log-prob 0.0.

Shapes: `T` tokens of the sample, `R` tokens of its response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np

from tokentape_contracts.accounting import Reason
from tokentape_contracts.errors import PrefixBroken, StreamCorrupt
from tokentape_contracts.events import Ids, ReplaySpec, SessionOpened
from tokentape_contracts.samples import Sample, Status
from tokentape_contracts.tokens import first_bad_id, first_bad_log_prob
from tokentape_core.domain.counters import (
    prefix_cache_info,
    spec_info,
    weight_version_spans,
    weight_versions,
)
from tokentape_core.domain.replay import Stored, sample_rows
from tokentape_core.domain.state import Turn

Decode = Callable[[Ids], str]
"""Token ids to text."""

_STATUS: Final = {
    "stop": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A turn in the making of a sample: its first `size` output tokens, which end at `end`."""

    turn: Turn
    size: int
    status: Status

    @property
    def start(self) -> int:
        return self.turn.prompt_length

    @property
    def end(self) -> int:
        return self.turn.prompt_length + self.size


@dataclass(frozen=True, eq=False)
class PathPlan:
    """What of a path becomes its sample, and why the rest of its sampled tokens does not.

    Attributes:
        path: from the root to the leaf.
        tokens: int32[T], those of the whole path.
        merged: the turns of the sample, in order; none if nothing of the path fits into `max_seq_len`.
        left_out: seq → reasons, each with its number of output tokens, of every turn of the path that is not
            in the sample as a whole.
        is_cut: whether turns of the path were cut or left out for their length.
    """

    path: Sequence[Turn]
    tokens: Ids
    merged: Sequence[Piece]
    left_out: Mapping[int, Sequence[tuple[Reason, int]]]
    is_cut: bool

    @cached_property
    def spans(self) -> dict[int, slice]:
        """Seq of each merged turn → where its output lies in the sample's response."""
        first = self.merged[0].start if self.merged else 0
        return {piece.turn.seq: slice(piece.start - first, piece.end - first) for piece in self.merged}

    @property
    def status(self) -> Status:
        """The last merged turn's, or truncated if turns were left out for their length."""
        status = self.merged[-1].status
        return Status.TRUNCATED if self.is_cut and status is Status.COMPLETED else status


def plan_path(path: Sequence[Turn], opened: SessionOpened, max_seq_len: int | None) -> PathPlan:
    """Decides what of one root-to-leaf path becomes its sample.

    Raises:
        PrefixBroken: a turn's prompt does not begin with its parent's tokens.
    """
    tokens = path[-1].tokens
    whole = _cut(path, tokens, opened.max_trim_tokens)
    fitting = whole if max_seq_len is None else _truncate(whole, max_seq_len)
    merged, reason = _mergeable(fitting, opened.replay)
    left_out: dict[int, list[tuple[Reason, int]]] = {}
    for place, piece in enumerate(whole):
        fits = fitting[place].size if place < len(fitting) else 0
        if fits == len(piece.turn.event.output) and place < len(merged):
            continue
        sizes = (
            (Reason.TRIMMED, len(piece.turn.event.output) - piece.size),
            (Reason.OVER_MAX_SEQ_LEN, piece.size - fits),
            (reason, fits if place >= len(merged) else 0),
        )
        if why := [(reason, size) for reason, size in sizes if size]:
            left_out[piece.turn.seq] = why
    is_cut = [piece.size for piece in fitting] != [piece.size for piece in whole]
    return PathPlan(path, tokens, merged, left_out, is_cut)


def path_sample(plan: PathPlan, opened: SessionOpened, decode: Decode, stored: Stored) -> Sample:
    """The sample of a path of which something is merged.

    Args:
        opened: how the session was opened.
        stored: the bytes of the path's routing replay rows.

    Raises:
        StreamCorrupt: the events hold an id or a log-prob that no recorder writes.
        ReplayBroken: see `sample_rows`.
    """
    sample = _merge(plan, decode)
    if (place := first_bad_id(sample.tokens)) is not None:
        raise StreamCorrupt(f"token {place} of the path has the id {sample.tokens[place]}")
    if (place := first_bad_log_prob(sample.rollout_log_probs)) is not None:
        raise StreamCorrupt(
            f"token {place} of the response has the log-prob {sample.rollout_log_probs[place]}"
        )
    turns = [piece.turn for piece in plan.merged]
    for kind, spec in opened.replay.items():
        setattr(sample, f"rollout_{kind}", sample_rows(turns, kind, spec, stored, len(sample.tokens)))
    return sample


def _cut(path: Sequence[Turn], final: Ids, max_trim_tokens: int) -> list[Piece]:
    prompted = len(final)  # what lies behind the shortest later prompt was sampled by a later turn
    pieces: list[Piece] = []
    for turn in reversed(path):
        output = turn.event.output
        size = _common_length(output, final[turn.prompt_length : prompted])
        prompted = min(prompted, turn.prompt_length)
        allowed = 0 if turn is path[-1] else max_trim_tokens
        if len(output) - size > allowed:
            raise PrefixBroken(
                f"turn {turn.seq}: {len(output) - size} of its {len(output)} output tokens are not in the "
                f"prompt of a later turn; {allowed} may be missing"
            )
        pieces.append(Piece(turn, size, _STATUS.get(turn.event.finish, Status.FAILED)))
    return pieces[::-1]


def _common_length(a: Ids, b: Ids) -> int:
    """How many tokens the two have in common at the start."""
    length = min(len(a), len(b))
    if a[:length].tobytes() == b[:length].tobytes():  # nearly always, and the cheapest way to see it
        return length
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _truncate(pieces: Sequence[Piece], max_seq_len: int) -> list[Piece]:
    kept: list[Piece] = []
    for piece in pieces:
        size = piece.size - max(0, piece.end - max_seq_len)
        if size == piece.size:
            kept.append(piece)
            continue
        if size > 0:
            kept.append(replace(piece, size=size, status=Status.TRUNCATED))
        break
    return kept


def _mergeable(pieces: Sequence[Piece], replay: Mapping[str, ReplaySpec]) -> tuple[list[Piece], Reason]:
    """The pieces up to the first that did not complete, or before the first without its routing replay rows.

    And why the others are not among them.
    """
    full = [kind for kind, spec in replay.items() if spec.rows == "full"]
    merged = list(pieces[:1])
    for piece in pieces[1:]:
        had, has = merged[-1].turn.event.replay, piece.turn.event.replay
        if merged[-1].status is not Status.COMPLETED:
            return merged, Reason.AFTER_CUT
        if any(kind in had and kind not in has for kind in full):
            return merged, Reason.REPLAY_ROWS_MISSING
        _ensure_continues(merged[-1], piece)
        merged.append(piece)
    return merged, Reason.AFTER_CUT


def _merge(plan: PathPlan, decode: Decode) -> Sample:
    merged, spans = plan.merged, plan.spans
    last = merged[-1]
    whole = plan.tokens if last.turn is plan.path[-1] else last.turn.tokens
    tokens = whole[: last.end]
    first = merged[0].start
    mask = np.zeros(last.end - first, np.uint8)
    logprobs = np.zeros(last.end - first, np.float64)
    texts = []
    at = first
    for piece in merged:
        if piece.start > at:
            texts.append(decode(tokens[at : piece.start]))
        texts.append(decode(tokens[piece.start : piece.end]))
        mask[spans[piece.turn.seq]] = 1
        logprobs[spans[piece.turn.seq]] = piece.turn.event.logprobs[: piece.size]
        at = piece.end
    turns = [piece.turn for piece in merged]
    return Sample(
        tokens=tokens,
        response="".join(texts),
        response_length=len(mask),
        loss_mask=mask,
        rollout_log_probs=logprobs,
        status=plan.status,
        weight_versions=weight_versions(turns),
        prefix_cache_info=prefix_cache_info(turns),
        spec_info=spec_info(turns),
        metadata={
            "turns": [turn.seq for turn in turns],
            "lifecycle": _lifecycle(turns),
            **_version_spans(merged),
        },
    )


def _version_spans(merged: Sequence[Piece]) -> dict[str, Any]:
    """`weight_version_spans`, in positions of the response; no key if no engine gave any."""
    first = merged[0].start
    spans = [s for p in merged for s in weight_version_spans(p.turn, p.size, p.start - first)]
    return {"weight_version_spans": spans} if spans else {}


def _ensure_continues(before: Piece, after: Piece) -> None:
    """The later prompt must begin with the earlier piece's tokens."""
    keep = after.turn.event.keep
    if keep >= before.end:
        return
    repeated = after.turn.event.suffix[: before.end - keep]
    if not np.array_equal(repeated, before.turn.tokens[keep : before.end]):
        raise PrefixBroken(
            f"turn {after.turn.seq}: its prompt shares only {keep} of the {before.end} tokens of turn "
            f"{before.turn.seq}"
        )


def _lifecycle(turns: Sequence[Turn]) -> dict[str, Any] | list[dict[str, Any]]:
    """Per merged turn when it was requested (`req_ts`), generated (`t0` to `t1`), and the one before."""
    entries: list[dict[str, Any]] = []
    for number, turn in enumerate(turns, 1):
        latency = turn.event.meta.get("e2e_latency")
        done = turn.event.committed_at
        entry = {
            "t0": done - latency if isinstance(latency, int | float) else None,
            "t1": done,
            "turn": number,
            "req_ts": turn.event.requested_at,
        }
        if number > 1:
            entry["prev_t1"] = turns[number - 2].event.committed_at
        entries.append(entry)
    return entries[0] if len(entries) == 1 else entries
