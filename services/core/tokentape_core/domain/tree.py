"""Trees: the tables that describe a forest of turns, and the hooks that make training samples of it.

A node is a turn. Its `id` is its seq less one, as existing tools count from zero. A leaf is a turn that no
other continues; each kept leaf becomes one sample, its root-to-leaf path.

Two hooks decide what is trained:

- *pick* chooses among the leaves and orders them; it reads and changes nothing.
- *finish* gets the samples of the kept leaves and may change masks, metadata and rewards.

Order and choice depend on seq alone, never on wall-clock times.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokentape_contracts.samples import Sample
from tokentape_core.domain.state import SessionState, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A turn that no other continues.

    Attributes:
        turn: the turn.
        is_last_child: no sibling, leaf or not, was recorded after it. True of roots.
        retried_by: the seq of the last later turn that repeated its input; None if none did.
    """

    turn: Turn
    is_last_child: bool
    retried_by: int | None = None

    @property
    def node_id(self) -> int:
        return self.turn.seq - 1

    @property
    def path(self) -> list[Turn]:
        """The turns from the root to this one."""
        return self.turn.path


@dataclass(frozen=True, slots=True, eq=False)
class LeafSample:
    """A kept leaf and its sample.

    Attributes:
        leaf: the leaf.
        sample: may be changed by the finish hook.
        spans: seq of each merged turn → where its output lies in the response.
    """

    leaf: Leaf
    sample: Sample
    spans: Mapping[int, slice]


Pick = Callable[[Sequence[Leaf]], Sequence[Leaf]]
"""Gets all leaves in the order of their seq; returns some of them, each once, in the samples' order."""

Finish = Callable[[Sequence[LeafSample], Mapping[str, Any]], None]
"""Gets the samples in order and the agent's metadata; changes the samples in place."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """The two hooks of a session in tree mode."""

    pick: Pick
    finish: Finish


def unretried(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The default pick: all leaves but those whose input a later turn repeated.

    Siblings with other new messages are parallel work and stay. Longer paths come first, and of equal ones
    the later.
    """
    return _ordered(leaf for leaf in leaves if leaf.retried_by is None)


def superseded(leaves: Sequence[Leaf]) -> list[Leaf]:
    """A stricter pick: a leaf with any later sibling is dropped; roots are kept. The order is the same."""
    return _ordered(leaf for leaf in leaves if leaf.is_last_child)


def every_leaf(leaves: Sequence[Leaf]) -> list[Leaf]:
    """The pick that drops nothing. The order is the same."""
    return _ordered(leaves)


def _ordered(leaves: Iterable[Leaf]) -> list[Leaf]:
    return sorted(leaves, key=lambda leaf: (len(leaf.path), leaf.turn.seq), reverse=True)


def train_once(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
    """The default finish: a turn that several samples share is trained in the earliest leaf's only.

    In the others its loss mask is 0. The agent's metadata is merged into every sample's without touching what
    the server owns, and its `reward` becomes the samples' reward.
    """
    trained: set[int] = set()
    for item in sorted(samples, key=lambda item: item.leaf.turn.seq):
        for seq, span in item.spans.items():
            if seq in trained:
                item.sample.loss_mask[span] = 0
            trained.add(seq)
    agents = {key: value for key, value in metadata.items() if key not in SERVER_KEYS}
    for item in samples:
        item.sample.metadata = {**agents, **item.sample.metadata}
        if metadata.get("reward") is not None:
            item.sample.reward = metadata["reward"]


SERVER_KEYS: Final = frozenset(
    {
        "accounting",
        "accumulated_token_ids",
        "counters",
        "leaf",
        "lifecycle",
        "max_trim_tokens",
        "session_id",
        "tito_session_mismatch",
        "tree",
        "turns",
        "weight_version_spans",
    }
)
"""Metadata keys that the server owns, in a sample or for the whole session; an agent's are dropped."""

PICKS: Final[Mapping[str, Pick]] = {pick.__name__: pick for pick in (unretried, superseded, every_leaf)}
"""The built-in picks by name."""

DEFAULT_HOOKS = Hooks(unretried, train_once)


def leaves(state: SessionState) -> list[Leaf]:
    """The leaves, in the order of their seq."""
    last_child: dict[int, int] = {}
    for turn in state.turns:
        last_child[turn.event.parent] = turn.seq
    again = _retries(state)
    return [
        Leaf(turn, turn.parent is None or last_child[turn.event.parent] == turn.seq, again.get(turn.seq))
        for turn in state.turns
        if turn.seq not in last_child
    ]


def prompt_key(turn: Turn) -> tuple[int, int, bytes]:
    """What is equal for turns of a session with the same parent whose engine read the same prompt."""
    return turn.event.parent, turn.event.keep, turn.event.suffix.tobytes()


def _retries(state: SessionState) -> dict[int, int]:
    """Seq of each turn that was retried → seq of the last turn that repeated its input.

    The input is repeated if the engine read the same tokens after the same parent, however the messages were
    spelled.
    """
    siblings = Counter(turn.event.parent for turn in state.turns)
    last: dict[tuple[int, int, bytes], int] = {}
    again: dict[int, int] = {}
    for turn in reversed(state.turns):
        if siblings[turn.event.parent] == 1:
            continue
        newest = last.setdefault(prompt_key(turn), turn.seq)
        if newest != turn.seq:
            again[turn.seq] = newest
    return again


def tables(state: SessionState) -> dict[str, Any]:
    """`nodes` and `leaves`, as JSON.

    A node's `completion_span` is where its output lies in its own tokens, `[start, end)`; `truncated` says
    that it was cut at its length.
    """
    nodes = [
        {
            "id": turn.seq - 1,
            "parent": parent_id(turn),
            "seq": turn.seq - 1,
            "truncated": turn.event.finish == "length",
            "committed_at": turn.event.committed_at,
            "completion_span": [turn.prompt_length, turn.length],
            "num_tokens": turn.length,
            "response_id": turn.event.response_id,
        }
        for turn in state.turns
    ]
    return {
        "nodes": nodes,
        "leaves": [{"node_id": leaf.node_id, "path_node_ids": path_ids(leaf)} for leaf in leaves(state)],
    }


def leaf_metadata(leaf: Leaf) -> dict[str, Any]:
    """What a sample's metadata says about its leaf."""
    return {
        "node_id": leaf.node_id,
        "parent": parent_id(leaf.turn),
        "path_node_ids": path_ids(leaf),
        "response_id": leaf.turn.event.response_id,
    }


def parent_id(turn: Turn) -> int | None:
    """The parent's node id; None for a root."""
    return turn.parent.seq - 1 if turn.parent else None


def path_ids(leaf: Leaf) -> list[int]:
    """The node ids from the root to the leaf."""
    return [turn.seq - 1 for turn in leaf.path]
