"""Random forests: what is kept is trained once, and only seq decides."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.events import TurnRecorded
from tokentape_core.domain.assemble import assemble
from tokentape_core.domain.state import SessionState
from tokentape_core.domain.tree import leaves, superseded

FINISHES = ("stop", "tool_calls", "stop", "stop", "length", "abort")


def _decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


@st.composite
def forests(draw: st.DrawFn, trim: int = 1) -> list[TurnRecorded]:
    """Up to 14 turns; a prompt may leave out `trim` tokens of its parent's output. No id comes twice."""
    events: list[TurnRecorded] = []
    lengths, outputs = [0], [0]
    token = 0
    for seq in range(1, draw(st.integers(1, 14)) + 1):
        parent = draw(st.integers(0, seq - 1))
        suffix, output = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        keep = lengths[parent] - draw(st.integers(0, min(trim, outputs[parent])))
        ids = np.arange(token, token + suffix + output)
        token += suffix + output
        events.append(
            turn(
                parent=parent,
                keep=keep,
                suffix=ids[:suffix],
                output=ids[suffix:],
                finish=draw(st.sampled_from(FINISHES)),
            )
        )
        lengths.append(keep + suffix + output)
        outputs.append(output)
    return events


def _state(events: list[TurnRecorded]) -> SessionState:
    return state_of(*events, first=opened(mode="tree", max_trim_tokens=1))


@given(forests(), st.none() | st.integers(1, 40))
def test_trained_at_most_once(events: list[TurnRecorded], max_seq_len: int | None) -> None:
    """No sampled token is trained twice over all samples; nothing but sampled tokens is trained."""
    assembly = assemble(_state(events), _decode, max_seq_len=max_seq_len)
    trained = Counter(
        token
        for sample in assembly.samples
        for token, mask in zip(
            sample.tokens[len(sample.tokens) - len(sample.loss_mask) :].tolist(),
            sample.loss_mask,
            strict=True,
        )
        if mask
    )
    sampled = {int(token) for event in events for token in event.output}
    assert not trained or max(trained.values()) == 1
    assert trained.keys() <= sampled


@given(forests(trim=0))
def test_trained_exactly_once(events: list[TurnRecorded]) -> None:
    """Unless trimmed, every sampled token of a kept leaf's sample is trained in exactly one of them."""
    assembly = assemble(_state(events), _decode)
    trained: Counter[int] = Counter()
    present: set[int] = set()
    sampled = {int(token) for event in events for token in event.output}
    for sample in assembly.samples:
        response = sample.tokens[len(sample.tokens) - len(sample.loss_mask) :].tolist()
        present |= sampled.intersection(response)
        trained.update(token for token, mask in zip(response, sample.loss_mask, strict=True) if mask)
    assert trained == Counter(present)


@given(forests())
def test_a_leafs_tokens_are_its_paths(events: list[TurnRecorded]) -> None:
    """Every kept leaf's tokens are the beginning of its path's, as the engine saw them."""
    state = _state(events)
    for sample in assemble(state, _decode).samples:
        leaf = state.turns[sample.metadata["leaf"]["node_id"]]
        merged = [seq + 1 for seq in sample.metadata["leaf"]["path_node_ids"]]
        assert merged == [turn.seq for turn in leaf.path]
        lifecycle = sample.metadata["lifecycle"]
        last = leaf.path[len(lifecycle) - 1 if isinstance(lifecycle, list) else 0]
        assert sample.tokens.tolist() == last.tokens[: len(sample.tokens)].tolist()


@given(forests(), st.randoms(use_true_random=False))
def test_clocks_do_not_matter(events: list[TurnRecorded], random: Any) -> None:
    """Picking, order and masks are the same whatever the wall clocks say."""
    state = _state(events)
    shuffled = _state([replace(event, committed_at=random.random() * 1e9) for event in events])
    picked = [leaf.node_id for leaf in superseded(leaves(state))]
    assert picked == [leaf.node_id for leaf in superseded(leaves(shuffled))]
    ours, theirs = assemble(state, _decode), assemble(shuffled, _decode)
    assert [s.loss_mask.tolist() for s in ours.samples] == [s.loss_mask.tolist() for s in theirs.samples]
    assert [s.tokens.tolist() for s in ours.samples] == [s.tokens.tolist() for s in theirs.samples]
