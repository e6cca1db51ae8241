"""Leaves, tables and hooks of a tree."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.accounting import LeftOut, Reason
from tokentape_contracts.errors import HookFailed
from tokentape_core.domain.assemble import Assembly, assemble
from tokentape_core.domain.state import SessionState
from tokentape_core.domain.tree import (
    DEFAULT_HOOKS,
    PICKS,
    Hooks,
    Leaf,
    LeafSample,
    every_leaf,
    leaves,
    superseded,
    tables,
    unretried,
)


def decode(ids: Any) -> str:
    return "".join(f"[{token}]" for token in ids)


def tree(*parents: int, **given: Any) -> SessionState:
    """A tree whose turn number i continues `parents[i - 1]`; each adds one prompt and two output tokens."""
    lengths = {0: 0}
    events = []
    for seq, parent in enumerate(parents, 1):
        keep = lengths[parent]
        tokens = {"suffix": [100 + seq], "output": [200 + seq, 300 + seq]}
        events.append(turn(parent=parent, keep=keep, response_id=f"r{seq}", **tokens, **given))
        lengths[seq] = keep + 3
    return state_of(*events, first=opened(mode="tree", max_trim_tokens=0))


def branches(*rows: tuple[int, int]) -> SessionState:
    """A tree of turns with one output token, each of a parent and one new prompt token."""
    lengths = {0: 0}
    events = []
    for seq, (parent, token) in enumerate(rows, 1):
        keep = lengths[parent]
        events.append(turn(parent=parent, keep=keep, suffix=[token], output=[100 + seq]))
        lengths[seq] = keep + 2
    return state_of(*events, first=opened(mode="tree", max_trim_tokens=0))


def nodes_of(assembly: Assembly) -> list[int]:
    return [sample.metadata["leaf"]["node_id"] for sample in assembly.samples]


@pytest.mark.parametrize(
    ("parents", "kept"),
    [
        ((0,), [0]),
        ((0, 1, 2), [2]),
        ((0, 1, 1), [2]),
        ((0, 0), [1, 0]),
        ((0, 1, 1, 2), [3, 2]),
        ((0, 1, 1, 3), [3]),
        ((0, 1, 2, 0), [2, 3]),
        ((0, 1, 2, 1), [2, 3]),
        ((0, 1, 1, 1, 1), [4]),
    ],
)
def test_superseded(parents: tuple[int, ...], kept: list[int]) -> None:
    """A leaf with a later sibling is dropped, roots are kept; long paths first, then late ones."""
    state = tree(*parents)
    assert [leaf.node_id for leaf in superseded(leaves(state))] == kept
    # No input comes twice in these trees.
    assert sorted(leaf.node_id for leaf in unretried(leaves(state))) == [
        turn.seq - 1 for turn in state.turns if turn.seq not in parents
    ]


# parent and suffix of each turn → what `unretried` keeps, in order
RETRIES: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "a retry": ([(0, 1), (1, 2), (1, 2)], [2]),
    "a retry of the first turn": ([(0, 1), (0, 1)], [1]),
    "two retries": ([(0, 1), (0, 1), (0, 1)], [2]),
    "other new messages": ([(0, 1), (1, 2), (1, 3)], [2, 1]),
    "other first messages": ([(0, 1), (0, 2)], [1, 0]),
    "a retry that went on before": ([(0, 1), (1, 2), (0, 1)], [1, 2]),
    "a retry that goes on": ([(0, 1), (0, 1), (2, 2)], [2]),
    "the same words elsewhere": ([(0, 1), (1, 2), (2, 2)], [2]),
}


@pytest.mark.parametrize("case", RETRIES)
def test_unretried(case: str) -> None:
    """A leaf is dropped if a later turn read the same prompt; parallel work stays; long paths come first."""
    rows, kept = RETRIES[case]
    state = branches(*rows)
    assert [leaf.node_id for leaf in unretried(leaves(state))] == kept
    assert DEFAULT_HOOKS.pick is unretried


def test_every_leaf() -> None:
    """Nothing is dropped; long paths come first, then late ones."""
    assert [leaf.node_id for leaf in every_leaf(leaves(branches((0, 1), (0, 1), (1, 2), (1, 2))))] == [
        3,
        2,
        1,
    ]


def test_built_in_picks_are_known_by_name() -> None:
    """The names that a worker can be started with are the functions' own."""
    assert dict(PICKS) == {f.__name__: f for f in (unretried, superseded, every_leaf)}


def test_a_shared_turn_is_trained_in_the_earliest_leaf() -> None:
    """Turn 1 is shared by leaves 3 and 4: its tokens count in leaf 3's sample only."""
    assembly = assemble(tree(0, 1, 2, 1), decode)
    assert nodes_of(assembly) == [2, 3]
    assert [sample.loss_mask.tolist() for sample in assembly.samples] == [
        [1, 1, 0, 1, 1, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]


def test_metadata_and_reward() -> None:
    """The agent's metadata comes back in every sample, its reward as the reward; our keys stay ours."""
    metadata = {
        "reward": 0.5,
        "note": "n",
        "leaf": "mine",
        "lifecycle": 1,
        "accumulated_token_ids": [],
        "tree": 2,
    }
    for sample in assemble(tree(0, 0), decode, metadata=metadata).samples:
        assert sample.reward == 0.5
        assert sample.metadata["note"] == "n"
        assert isinstance(sample.metadata["leaf"], dict)
        assert isinstance(sample.metadata["lifecycle"], dict)
        assert len(sample.metadata["accumulated_token_ids"]) == 3
        assert "tree" not in sample.metadata


def test_no_reward_stays_none() -> None:
    """Without a reward, and with a null one, the samples have none."""
    for metadata in (None, {}, {"reward": None}):
        assert assemble(tree(0), decode, metadata=metadata).samples[0].reward is None


def test_tables() -> None:
    """Nodes and leaves count from zero; spans and lengths are in the node's own tokens."""
    state = state_of(
        turn(suffix=[1, 2], output=[3], response_id="a"),
        turn(parent=1, keep=3, suffix=[4], output=[5, 6], finish="length", response_id="b"),
        first=opened(mode="tree"),
    )
    table = tables(state)
    assert table["nodes"][1] == {
        "id": 1,
        "parent": 0,
        "seq": 1,
        "truncated": True,
        "committed_at": 102.0,
        "completion_span": [4, 6],
        "num_tokens": 6,
        "response_id": "b",
    }
    assert table["leaves"] == [{"node_id": 1, "path_node_ids": [0, 1]}]


def test_empty_trees() -> None:
    """A tree without turns is `no_records`; one of which nothing fits is `all_truncated`."""
    empty = assemble(state_of(first=opened(mode="tree")), decode)
    assert (empty.samples, empty.empty_reason) == ([], "no_records")
    assert empty.session_metadata["tree"] == {"nodes": [], "leaves": []}
    cut = assemble(tree(0, 0), decode, max_seq_len=1)
    assert (cut.samples, cut.empty_reason) == ([], "all_truncated")


def test_two_hundred_leaves() -> None:
    """A session with 200 leaves gives 200 samples in order, and its shared turn is trained once."""
    state = tree(0, *([1] * 200))
    everything: Hooks = Hooks(lambda all_leaves: all_leaves, DEFAULT_HOOKS.finish)
    assembly = assemble(state, decode, hooks=everything)
    assert nodes_of(assembly) == list(range(1, 201))
    assert sum(int(sample.loss_mask[0]) for sample in assembly.samples) == 1
    assert nodes_of(assemble(state, decode, hooks=Hooks(superseded, DEFAULT_HOOKS.finish))) == [200]


def _boom(*_: Any) -> Any:
    raise KeyError("boom")


def _twice(all_leaves: Sequence[Leaf]) -> list[Leaf]:
    return [all_leaves[0], all_leaves[0]]


def _foreign(_: Sequence[Leaf]) -> list[Leaf]:
    return leaves(tree(0, 1, 2, 3, 4))


def _none(_: Sequence[Leaf]) -> None:
    return None


@pytest.mark.parametrize("pick", [_boom, _twice, _foreign, _none])
def test_bad_pick(pick: Callable[..., Any]) -> None:
    """A pick that raises, repeats a leaf, invents one or returns nothing is refused by its name."""
    with pytest.raises(HookFailed, match=pick.__name__):
        assemble(tree(0, 1), decode, hooks=Hooks(pick, DEFAULT_HOOKS.finish))


def test_bad_finish() -> None:
    """A finish that raises is refused by its name."""
    with pytest.raises(HookFailed, match="_boom raised KeyError"):
        assemble(tree(0), decode, hooks=Hooks(DEFAULT_HOOKS.pick, _boom))


def _spoilt(**values: Any) -> Callable[..., None]:
    """A finish hook that sets these fields of every sample."""

    def finish(samples: Sequence[LeafSample], _: Mapping[str, Any]) -> None:
        for item in samples:
            for name, value in values.items():
                setattr(item.sample, name, value)

    return finish


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    "a shorter mask": ({"loss_mask": np.ones(1)}, "arrays of unequal lengths .* 1 of loss_mask, 2 of"),
    "a ragged mask": ({"loss_mask": [[1], [1, 0]]}, "left no arrays"),
    "log-probs that are text": ({"rollout_log_probs": ["a", "b"]}, "left no arrays"),
    "no tokens": ({"tokens": None}, "left no arrays"),
    "a status that is text": ({"status": "completed"}, "left a status or metadata of another type"),
    "no metadata": ({"metadata": None}, "left a status or metadata of another type"),
    "fewer log-probs": ({"rollout_log_probs": np.zeros(1)}, "1 of rollout_log_probs"),
    "another length": ({"response_length": 3}, "response_length 3"),
    "no mask": ({"loss_mask": None}, "left no arrays"),
    "fewer tokens": ({"tokens": np.zeros(1, np.int32)}, "1 tokens"),
    "a log-prob that is none": ({"rollout_log_probs": np.array([-1, np.nan])}, "left the log-prob nan"),
    "a log-prob above 0": ({"rollout_log_probs": [0.5, -1]}, "left the log-prob 0.5"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_a_finish_that_spoils_a_sample(case: str) -> None:
    """Arrays that do not fit each other, and log-probs that are none, are refused by the hook's name."""
    values, text = SPOILT[case]
    with pytest.raises(HookFailed, match=f"_spoilt.<locals>.finish .*{text}"):
        assemble(tree(0), decode, hooks=Hooks(DEFAULT_HOOKS.pick, _spoilt(**values)))


def test_a_finish_that_trains_twice() -> None:
    """A token that is trained in two samples would count twice: the hook must mask it in all but one."""
    hooks = Hooks(DEFAULT_HOOKS.pick, lambda *_: None)
    with pytest.raises(HookFailed, match="turn 1 is trained in two samples"):
        assemble(tree(0, 1, 1), decode, hooks=hooks)
    assert len(assemble(tree(0, 0), decode, hooks=hooks).samples) == 2


def test_a_finish_that_trains_what_was_not_sampled() -> None:
    """The environment's tokens have no log-probs: a mask over them is refused."""
    everything = _spoilt(loss_mask=np.ones(5, np.uint8))
    with pytest.raises(HookFailed, match="tokens that no model sampled are trained"):
        assemble(tree(0, 1), decode, hooks=Hooks(DEFAULT_HOOKS.pick, everything))


def test_a_finish_may_shorten_a_sample() -> None:
    """What it cuts away counts as masked by it."""

    def finish(samples: Sequence[LeafSample], _: Mapping[str, Any]) -> None:
        sample = samples[0].sample
        sample.loss_mask, sample.rollout_log_probs = sample.loss_mask[:1], sample.rollout_log_probs[:1]
        sample.tokens, sample.response_length = sample.tokens[:2], 1

    assembly = assemble(tree(0), decode, hooks=Hooks(DEFAULT_HOOKS.pick, finish))
    assert assembly.accounting.left_out == [LeftOut(1, 1, Reason.MASKED_BY_HOOK)]


def test_own_hooks() -> None:
    """A pick may keep any leaves in any order; a finish may change masks, rewards and metadata."""

    def pick(all_leaves: Sequence[Leaf]) -> list[Leaf]:
        return list(reversed(all_leaves))[:2]

    def finish(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
        for rank, item in enumerate(samples):
            item.sample.reward = float(rank)
            item.sample.loss_mask[:] = 0
            item.sample.metadata["seen"] = dict(metadata)

    assembly = assemble(tree(0, 0, 0), decode, metadata={"k": 1}, hooks=Hooks(pick, finish))
    assert nodes_of(assembly) == [2, 1]
    assert [sample.reward for sample in assembly.samples] == [0.0, 1.0]
    assert not any(np.any(sample.loss_mask) for sample in assembly.samples)
    assert assembly.samples[0].metadata["seen"] == {"k": 1}


def test_a_lack_of_memory_is_no_outcome() -> None:
    """A hook that finds no memory is not refused for good: the assembly failed, and may be tried again."""

    def greedy(leaves: Any) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        assemble(state_of(turn(), first=opened(mode="tree")), str, hooks=Hooks(greedy, lambda *_: None))
