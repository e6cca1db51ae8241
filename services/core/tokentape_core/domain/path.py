"""A path of turns becomes one training sample.

Three passes over the turns of a path:

1. *Cut.* What the next turn's prompt did not keep of a turn's output (at most `max_trim_tokens`, a stop token
   that the template renders again) is taken from that output, so that no token counts twice.
2. *Truncate*, turn by turn and before merging: the first turn above `max_seq_len` loses output from its end;
   if its prompt alone does not fit it is dropped; later turns are dropped.
3. *Merge* while the turn before is `completed`. Tokens between two outputs came from the environment: loss
   mask 0, log-prob 0.0.

Shapes: `T` tokens of the sample, `R` tokens of its response.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from tokentape_contracts.errors import PrefixBroken
from tokentape_contracts.events import Ids
from tokentape_contracts.samples import Sample, Status
from tokentape_core.domain.state import Turn

Decode = Callable[[Ids], str]
"""Token ids to text."""

_STATUS: Final = {
    "stop": Status.COMPLETED,
    "tool_calls": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}
_SPEC_COUNTERS: Final = {
    "spec_num_correct_drafts": ("spec_num_correct_drafts", "spec_accept_token_num"),
    "spec_num_proposed_drafts": ("spec_num_proposed_drafts", "spec_draft_token_num"),
    "spec_verify_ct": ("spec_verify_ct",),
}
"""Our name of each speculative-decoding counter, and the names that SGLang gave it over time."""


def path_sample(
    path: Sequence[Turn], max_trim_tokens: int, decode: Decode, max_seq_len: int | None
) -> tuple[Sample, dict[int, slice]] | None:
    """The sample of one root-to-leaf path, and where each merged turn's output lies in its response.

    None if nothing of it fits into `max_seq_len`.
    """
    pieces = _cut(path, max_trim_tokens)
    if max_seq_len is not None:
        pieces = _truncate(pieces, max_seq_len)
    if not pieces:
        return None
    merged = _mergeable(pieces)
    first = merged[0].start
    spans = {piece.turn.seq: slice(piece.start - first, piece.end - first) for piece in merged}
    return _merge(merged, spans, decode), spans


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


def _mergeable(pieces: Sequence[_Piece]) -> list[_Piece]:
    """The pieces up to the first that did not complete."""
    merged = [pieces[0]]
    for piece in pieces[1:]:
        if merged[-1].status is not Status.COMPLETED:
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
        weight_versions=[
            str(version) for t in turns if (version := t.event.meta.get("weight_version")) is not None
        ],
        prefix_cache_info={
            "cached_tokens": _total(turns, "cached_tokens"),
            "total_prompt_tokens": _total(turns, "prompt_tokens"),
        },
        spec_info=_spec_info(turns),
        metadata={"lifecycle": _lifecycle(turns)},
    )


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


def _total(turns: Sequence[Turn], counter: str) -> int:
    return sum(_number(turn.event.meta.get(counter)) or 0 for turn in turns)


def _spec_info(turns: Sequence[Turn]) -> dict[str, int]:
    """The sums of the counters that the engine sent; empty without speculative decoding."""
    info: dict[str, int] = {}
    if not any(key.startswith("spec_") for turn in turns for key in turn.event.meta):
        return info
    for name, spellings in _SPEC_COUNTERS.items():
        values = [value for turn in turns if (value := _first(turn, spellings)) is not None]
        if values:
            info[name] = sum(values)
    if info:
        info["completion_tokens"] = sum(len(turn.event.output) for turn in turns)
    return info


def _first(turn: Turn, counters: Sequence[str]) -> int | None:
    return next((v for name in counters if (v := _number(turn.event.meta.get(name))) is not None), None)


def _number(counter: Any) -> int | None:
    """A counter as the engine sent it; None if it is not a number: the tokens are right all the same."""
    return int(counter) if isinstance(counter, int | float) and math.isfinite(counter) else None


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
