"""Routing replay rows: which experts (or index entries) the engine chose for each token, stored once.

Row `t` is what the engine chose while it read token `t`. The last token of a turn was sampled and not read,
so a turn of `T` tokens has `T - 1` rows; the next turn's engine call reads that token and brings its row.

An engine sends either all rows of a turn (`full`) or only those that the parent turn has not
(`incremental`). Full payloads repeat the prefix every turn: a row that equals the parent's is not stored
again, so what is kept grows with the new tokens only, and still every payload can be restored to the bit.

Shapes: `N` rows of a payload, `L` layers, `K` numbers per layer, `T` tokens of a path.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tokentape_contracts.errors import ReplayBroken, StreamCorrupt
from tokentape_contracts.events import Blob, ReplaySpec
from tokentape_core.domain.state import Turn

KINDS: Final = ("routed_experts", "indexer_topk")
"""The routing replay payloads that an engine may send; `rollout_<kind>` is the sample's field."""

Stored = Mapping[tuple[str, str], bytes]
"""`(event id, kind)` → the stored bytes of a turn's blob."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A run of rows: `values[i]` belongs to the token at position `start + i` of its path.

    Attributes:
        start: the first row's position.
        values: [N, L, K], in the smallest of uint8, uint16 and int32 that holds it.
    """

    start: int
    values: NDArray[Any]


def first_row(spec: ReplaySpec, parent: Turn | None, keep: int) -> int:
    """The first row that the engine is asked for.

    An incremental one has the parent's rows already, those of tokens that the prompt does not keep excepted.
    """
    if spec.rows != "incremental" or parent is None:
        return 0
    return _known(parent, keep)


def _known(parent: Turn, keep: int) -> int:
    """How many of the parent's rows hold for a turn that keeps so many of its tokens."""
    return max(0, min(parent.length - 1, keep))


def sources(rows: Rows, parent: Turn | None, kind: str) -> list[Turn]:
    """The turns whose stored bytes `deduplicate` needs: none unless the parent's rows may come again."""
    return chain(parent, kind) if parent is not None and rows.start == 0 else []


def deduplicate(
    rows: Rows, parent: Turn | None, kind: str, stored: Stored, part_bytes: int
) -> tuple[Blob, bytes]:
    """What is stored of a payload: the rows that differ from the parent's, and how to restore the others.

    Args:
        stored: the bytes of all turns of `sources`.
        part_bytes: the longest part.
    """
    values = rows.values
    before = restore(parent, kind, stored) if parent is not None and rows.start == 0 else None
    differs = np.ones(len(values), np.bool_)
    if before is not None and before.start == 0 and before.values.shape[1:] == values.shape[1:]:
        shared = min(len(before.values), len(values))
        differs[:shared] = (values[:shared] != before.values[:shared]).any(axis=(1, 2))
    kept = values if differs.all() else values[differs]
    data = np.ascontiguousarray(kept, kept.dtype.newbyteorder("<")).tobytes()
    blob = Blob(
        start=rows.start,
        rows=len(values),
        layers=values.shape[1],
        topk=values.shape[2],
        dtype=values.dtype.str[1:],
        stored=tuple((rows.start + first, count) for first, count in _runs(differs)),
        parts=-(-len(data) // part_bytes),
    )
    return blob, data


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """`(first, count)` of each run of true values."""
    edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
    return [(int(first), int(end - first)) for first, end in zip(edges[::2], edges[1::2], strict=True)]


def chain(turn: Turn, kind: str) -> list[Turn]:
    """The turns whose stored rows make up this turn's payload, the oldest first; none without a payload."""
    found: list[Turn] = []
    at: Turn | None = turn
    while at is not None and (blob := at.event.replay.get(kind)) is not None:
        found.append(at)
        if sum(count for _, count in blob.stored) == blob.rows:
            break
        at = at.parent
    return found[::-1]


def restore(turn: Turn, kind: str, stored: Stored, first: int | None = None) -> Rows | None:
    """The payload that the engine sent with this turn, to the bit; None if it sent none.

    Args:
        stored: the bytes of all turns of `chain`.
        first: leaves out the rows before this position.

    Raises:
        StreamCorrupt: stored bytes are missing or of a wrong length, or the rows were never stored.
    """
    blob = turn.event.replay.get(kind)
    if blob is None:
        return None
    start = blob.start if first is None else first
    values = np.empty((blob.start + blob.rows - start, blob.layers, blob.topk), f"<{blob.dtype}")
    missing = np.ones(len(values), np.bool_)
    at: Turn | None = turn
    while missing.any():
        if at is None or (source := at.event.replay.get(kind)) is None:
            row = start + int(np.flatnonzero(missing)[0])
            raise StreamCorrupt(f"turn {turn.seq}: row {row} of {kind} is stored nowhere")
        held = _stored_rows(at, kind, stored)
        if held.shape[1:] != values.shape[1:]:
            raise StreamCorrupt(
                f"turn {turn.seq}: rows of {kind} with {blob.layers} × {blob.topk} numbers cannot equal "
                f"those of turn {at.seq}, with {source.layers} × {source.topk}"
            )
        for run, count in source.stored:
            rows, held = held[:count], held[count:]
            begin, end = max(run - start, 0), min(run - start + count, len(values))
            if begin < end:
                wanted = missing[begin:end].copy()
                values[begin:end][wanted] = rows[begin + start - run : end + start - run][wanted]
                missing[begin:end] = False
        at = at.parent
    return Rows(start, values)


def _stored_rows(turn: Turn, kind: str, stored: Stored) -> NDArray[Any]:
    blob = turn.event.replay[kind]
    count = sum(count for _, count in blob.stored)
    if count == 0:
        return np.empty((0, blob.layers, blob.topk), f"<{blob.dtype}")
    data = stored.get((turn.event.id, kind), b"")
    values = np.frombuffer(data, f"<{blob.dtype}") if len(data) % int(blob.dtype[1:]) == 0 else np.empty(0)
    if values.size != count * blob.layers * blob.topk:
        raise StreamCorrupt(
            f"turn {turn.seq}: {len(data)} bytes of {kind} are stored instead of {count} rows of "
            f"{blob.layers} × {blob.topk} {blob.dtype}"
        )
    return values.reshape(count, blob.layers, blob.topk)


def sample_rows(
    turns: Sequence[Turn], kind: str, spec: ReplaySpec, stored: Stored, length: int
) -> NDArray[np.int32] | None:
    """The rows of a sample, int32[length - 1, L, K]; None if no turn has any.

    Args:
        turns: the merged turns, in order; each continues the one before.
        stored: the bytes of all turns of the path.
        length: tokens of the sample.

    Raises:
        ReplayBroken: a payload does not fit its turn, or rows of two turns do not meet; names turn and rows.
        StreamCorrupt: see `restore`.
    """
    having = [turn for turn in turns if kind in turn.event.replay]
    if not having or length < 2:
        return None
    for turn in turns:
        _ensure_fits(turn, kind, spec, having[0].event.replay[kind])
    if spec.rows == "full" and spec.prefix == "latest":
        having = having[-1:]
    first = having[0].event.replay[kind]
    values = np.empty((length - 1, first.layers, first.topk), np.int32)
    end = 0
    for turn in having:
        own = 0 if turn is having[0] or turn.parent is None else _known(turn.parent, turn.event.keep)
        end = min(turn.length, length) - 1
        if own < end and (rows := restore(turn, kind, stored, own)) is not None:
            values[own:end] = rows.values[: end - own]
    if end != length - 1:
        raise ReplayBroken(f"turn {turns[-1].seq}: rows {end} to {length - 2} of {kind} are missing")
    return values


def _ensure_fits(turn: Turn, kind: str, spec: ReplaySpec, first: Blob) -> None:
    """The payload of one turn of a sample is exactly the one that was asked for."""
    start = first_row(spec, turn.parent, turn.event.keep)
    expected = turn.length - 1 - start
    blob = turn.event.replay.get(kind)
    where = f"turn {turn.seq}: {kind}"
    if blob is None:
        if spec.rows == "incremental" and expected > 0:
            raise ReplayBroken(f"{where} was not sent; rows {start} to {start + expected - 1} are missing")
        return
    if expected < 1:
        raise ReplayBroken(f"{where} has {blob.rows} rows from {blob.start}, but this turn has none")
    if blob.start != start:
        fault = "leaves a gap" if blob.start > start else "overlaps"
        raise ReplayBroken(f"{where} begins with row {blob.start} and {fault}: row {start} comes next")
    if blob.rows != expected:
        raise ReplayBroken(f"{where} has {blob.rows} rows from {start} on, {expected} are needed")
    if (blob.layers, blob.topk) != (first.layers, first.topk):
        raise ReplayBroken(
            f"{where} has rows {start} to {start + expected - 1} of {blob.layers} layers × {blob.topk}, the "
            f"rows before have {first.layers} × {first.topk}"
        )
