"""A path of turns becomes one training sample.

Three passes over the turns of a path:

1. *Cut.* What the next turn's prompt did not keep of a turn's output (at most `max_trim_tokens`, a stop token
   that the template renders again) is taken from that output, so that no token counts twice.
2. *Truncate*, turn by turn and before merging: the first turn above `max_seq_len` loses output from its end;
   if its prompt alone does not fit it is dropped; later turns are dropped.
3. *Merge* while the turn before is `completed` and no turn lacks replay rows that the one before had. Tokens
   between two outputs came from the environment: loss mask 0, log-prob 0.0.

Shapes: `T` tokens of the sample, `R` tokens of its response.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tokentape_contracts.errors import PrefixBroken
from tokentape_contracts.events import Ids, ReplaySpec, SessionOpened
from tokentape_contracts.samples import Sample, Status
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


def path_sample(
    path: Sequence[Turn], opened: SessionOpened, decode: Decode, max_seq_len: int | None, stored: Stored
) -> tuple[Sample, dict[int, slice]] | None:
    """The sample of one root-to-leaf path, and where each merged turn's output lies in its response.

    None if nothing of it fits into `max_seq_len`.

    Args:
        opened: how the session was opened.
        stored: the bytes of the path's replay rows.
    """
    pieces = _cut(path, opened.max_trim_tokens)
    if max_seq_len is not None:
        pieces = _truncate(pieces, max_seq_len)
    if not pieces:
        return None
    merged = _mergeable(pieces, opened.replay)
    first = merged[0].start
    spans = {piece.turn.seq: slice(piece.start - first, piece.end - first) for piece in merged}
    sample = _merge(merged, spans, decode)
    turns = [piece.turn for piece in merged]
    for kind, spec in opened.replay.items():
        setattr(sample, f"rollout_{kind}", sample_rows(turns, kind, spec, stored, len(sample.tokens)))
    return sample, spans


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
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


def _cut(path: Sequence[Turn], max_trim_tokens: int) -> list[_Piece]:
    final = path[-1].tokens
    prompted = len(final)  # what lies behind the shortest later prompt was sampled by a later turn
    pieces: list[_Piece] = []
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
        pieces.append(_Piece(turn, size, _STATUS.get(turn.event.finish, Status.FAILED)))
    return pieces[::-1]


def _common_length(a: Ids, b: Ids) -> int:
    """How many tokens the two have in common at the start."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _truncate(pieces: Sequence[_Piece], max_seq_len: int) -> list[_Piece]:
    kept: list[_Piece] = []
    for piece in pieces:
        size = piece.size - max(0, piece.end - max_seq_len)
        if size == piece.size:
            kept.append(piece)
            continue
        if size > 0:
            kept.append(replace(piece, size=size, status=Status.TRUNCATED))
        break
    return kept


def _mergeable(pieces: Sequence[_Piece], replay: Mapping[str, ReplaySpec]) -> list[_Piece]:
    """The pieces up to the first that did not complete, or before the first that lost its replay rows."""
    full = [kind for kind, spec in replay.items() if spec.rows == "full"]
    merged = [pieces[0]]
    for piece in pieces[1:]:
        had, has = merged[-1].turn.event.replay, piece.turn.event.replay
        if merged[-1].status is not Status.COMPLETED or any(k in had and k not in has for k in full):
            break
        _ensure_continues(merged[-1], piece)
        merged.append(piece)
    return merged


def _merge(merged: Sequence[_Piece], spans: Mapping[int, slice], decode: Decode) -> Sample:
    last = merged[-1]
    tokens = last.turn.tokens[: last.end]
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
        status=last.status,
        weight_versions=weight_versions(turns),
        prefix_cache_info=prefix_cache_info(turns),
        spec_info=spec_info(turns),
        metadata={"lifecycle": _lifecycle(turns), **_version_spans(merged)},
    )


def _version_spans(merged: Sequence[_Piece]) -> dict[str, Any]:
    """`weight_version_spans`, in positions of the response; no key if no engine gave any."""
    first = merged[0].start
    spans = [s for p in merged for s in weight_version_spans(p.turn, p.size, p.start - first)]
    return {"weight_version_spans": spans} if spans else {}


def _ensure_continues(before: _Piece, after: _Piece) -> None:
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
