"""Random forests with routing replay rows: what is assembled equals a naive computation from whole payloads.

The naive side keeps the full payload of every turn. The other side stores what the recorder stores.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.property.test_trees import forests
from tests.support.sessions import opened
from tokentape_contracts.events import OPENED_ID, ReplaySpec, TurnRecorded
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.replay import Rows, deduplicate, first_row, restore, sources
from tokentape_core.domain.state import SessionState, Turn, apply, turn_id

KIND = "routed_experts"
LAYERS, TOPK = 2, 3
TRIM = 3
RANGES = ((0, 3), (0, 3), (250, 258), (-1, 2))
"""Few different numbers, so that equal rows are common, and now and then some that need a wider dtype."""


@dataclass
class Recording:
    """A recorded forest, and the whole payload of each of its turns that has one."""

    state: SessionState
    payloads: dict[int, NDArray[np.int32]] = field(default_factory=dict)
    stored: dict[tuple[str, str], bytes] = field(default_factory=dict)


def _narrow(values: NDArray[np.int32]) -> NDArray[Any]:
    for dtype in (np.uint8, np.uint16):
        if not values.size or (values.min() >= 0 and values.max() <= np.iinfo(dtype).max):
            return values.astype(dtype)
    return values


def _record(
    events: list[TurnRecorded], spec: ReplaySpec, random: np.random.Generator, gaps: float
) -> Recording:
    """Plays an engine that flips some rows of the prefix, and records what it sends."""
    first = opened(mode="tree", max_trim_tokens=TRIM, replay={KIND: spec})
    recording = Recording(apply(None, OPENED_ID, first))
    for seq, event in enumerate(events, 1):
        bare = apply(recording.state, turn_id(seq), event).turns[-1]
        count = max(bare.length - 1, 0)
        low, high = RANGES[random.integers(len(RANGES))]
        rows = random.integers(low, high, (count, LAYERS, TOPK)).astype(np.int32)
        parent = recording.payloads.get(event.parent)
        if parent is not None:
            shared = min(len(parent), max(event.keep, 0), count)
            stays = random.random(shared) < 0.8
            rows[:shared][stays] = parent[:shared][stays]
        replay = {}
        if count and random.random() >= gaps:
            start = first_row(spec, bare.parent, event.keep)
            sent = Rows(start, _narrow(rows[start:]))
            wanted = {(t.event.id, KIND) for t in sources(sent, bare.parent, KIND)}
            some = {key: data for key, data in recording.stored.items() if key in wanted}
            blob, data = deduplicate(sent, bare.parent, KIND, some, 16)
            replay[KIND] = blob
            recording.stored[event.id, KIND] = data
        if count and (replay or spec.rows == "incremental"):
            recording.payloads[seq] = rows
        recording.state = apply(recording.state, turn_id(seq), replace(event, replay=replay))
    return recording


def _merged(recording: Recording, sample: Any) -> list[Turn]:
    lifecycle = sample.metadata["lifecycle"]
    count = len(lifecycle) if isinstance(lifecycle, list) else 1
    return [recording.state.turns[node] for node in sample.metadata["leaf"]["path_node_ids"]][:count]


def _naive(recording: Recording, sample: Any, spec: ReplaySpec) -> list[Any] | None:
    """Row by row: of the last turn, or of the last one that read the token anew."""
    merged = _merged(recording, sample)
    having = [turn for turn in merged if turn.seq in recording.payloads]
    if not having:
        return None
    rows = []
    for position in range(len(sample.tokens) - 1):
        reader = having[-1] if spec.rows == "full" and spec.prefix == "latest" else having[0]
        if reader is having[0]:
            for turn in having[1:]:
                assert turn.parent is not None
                if position >= turn.parent.length - 1 or position >= turn.event.keep:
                    reader = turn
        rows.append(recording.payloads[reader.seq][position].tolist())
    return rows


@given(
    forests(trim=TRIM),
    st.sampled_from([("full", "latest"), ("full", "recorded"), ("incremental", "latest")]),
    st.none() | st.integers(1, 40),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.3]),
)
def test_assembled_rows_equal_a_naive_recomputation(
    events: list[TurnRecorded], mode: tuple[str, str], max_seq_len: int | None, seed: int, gaps: float
) -> None:
    """Every kept leaf has the rows that the whole payloads give, one for each token but the last."""
    spec = ReplaySpec(rows=mode[0], layers=LAYERS, prefix=mode[1])
    recording = _record(events, spec, np.random.default_rng(seed), gaps if mode[0] == "full" else 0.0)
    assembly = assemble(recording.state, lambda ids: "", max_seq_len=max_seq_len, stored=recording.stored)
    for sample in assembly.samples:
        expected = _naive(recording, sample, spec)
        rows = sample.rollout_routed_experts
        if expected is None or len(sample.tokens) < 2:
            assert rows is None
        else:
            assert rows is not None
            assert rows.dtype == np.int32
            assert rows.tolist() == expected


@given(forests(trim=TRIM), st.integers(0, 2**32))
def test_what_is_stored_gives_every_payload_back(events: list[TurnRecorded], seed: int) -> None:
    """The payload of every turn is restored to the bit, and no row that the parent holds is stored twice."""
    spec = ReplaySpec(rows="full", layers=LAYERS, prefix="latest")
    recording = _record(events, spec, np.random.default_rng(seed), 0.2)
    for turn in recording.state.turns:
        rows = restore(turn, KIND, recording.stored)
        payload = recording.payloads.get(turn.seq)
        if payload is None:
            assert rows is None
            continue
        assert rows is not None
        assert rows.values.tolist() == payload.tolist()
        parent = recording.payloads.get(turn.event.parent)
        stored = {p for first, count in turn.event.replay[KIND].stored for p in range(first, first + count)}
        for position, row in enumerate(payload):
            is_parents = parent is not None and position < len(parent) and (row == parent[position]).all()
            assert (position in stored) != is_parents
