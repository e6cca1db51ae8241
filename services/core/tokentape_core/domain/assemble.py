"""Assembly: what a samples request gives of a session.

`path` turns one root-to-leaf path into a sample; here it is decided of which paths there is one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from tokentape_contracts.errors import HookFailed
from tokentape_contracts.samples import Sample
from tokentape_core.domain.path import Decode, path_sample
from tokentape_core.domain.replay import Stored
from tokentape_core.domain.state import SessionState, Turn
from tokentape_core.domain.tree import (
    DEFAULT_HOOKS,
    Hooks,
    Leaf,
    LeafSample,
    Pick,
    leaf_metadata,
    leaves,
)
from tokentape_core.domain.view import Compare, mismatch, session_metadata

NOTHING_STORED: Final[Stored] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """What one samples request gives.

    Attributes:
        samples: in order.
        session_metadata: about the whole session.
        empty_reason: why there is no sample, or None.
        picked: leaves that were to become samples, the too long ones included.
    """

    samples: list[Sample]
    session_metadata: dict[str, Any]
    empty_reason: str | None = None
    picked: int = 0


def assemble(
    state: SessionState,
    decode: Decode,
    *,
    max_seq_len: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    hooks: Hooks = DEFAULT_HOOKS,
    compare: Compare | None = None,
    stored: Stored = NOTHING_STORED,
) -> Assembly:
    """The samples of a session.

    A linear one gives exactly one, the path to the newest turn. In tree mode every leaf that the pick hook
    keeps gives one, and the finish hook has the last word on them.

    Args:
        decode: decodes one piece of the response; the pieces' texts are concatenated.
        max_seq_len: longest sample in tokens, prompt included.
        metadata: the agent's own, for the finish hook; a linear session's is applied by the driver.
        compare: compares a path's tokens with the chat template's rendering.
        stored: the bytes of the replay rows of `replay_turns`.

    Raises:
        PrefixBroken: a turn's prompt does not begin with its parent's tokens.
        HookFailed: a hook raised or broke its contract.
        ReplayBroken, StreamCorrupt: see `sample_rows`.
    """
    about = session_metadata(state, compare)
    if state.head is None:
        return Assembly([], about, "no_records")
    if state.opened.mode == "tree":
        picked = _picked(leaves(state), hooks.pick)
        samples = _tree_samples(picked, state, decode, max_seq_len, metadata or {}, hooks, compare, stored)
        count = len(picked)
    else:
        built = path_sample(state.head.path, state.opened, decode, max_seq_len, stored)
        samples = [built[0]] if built else []
        count = 1
    return Assembly(samples, about, None if samples else "all_truncated", count)


def replay_turns(state: SessionState) -> list[Turn]:
    """The turns whose replay rows an assembly may need."""
    if state.opened.mode == "tree":
        turns: Sequence[Turn] = state.turns
    else:
        turns = state.head.path if state.head else ()
    return [turn for turn in turns if turn.event.replay]


def _tree_samples(
    picked: Sequence[Leaf],
    state: SessionState,
    decode: Decode,
    max_seq_len: int | None,
    metadata: Mapping[str, Any],
    hooks: Hooks,
    compare: Compare | None,
    stored: Stored,
) -> list[Sample]:
    items = []
    for leaf in picked:
        built = path_sample(leaf.path, state.opened, decode, max_seq_len, stored)
        if built is not None:
            sample, spans = built
            sample.metadata["accumulated_token_ids"] = leaf.turn.tokens
            sample.metadata["leaf"] = leaf_metadata(leaf)
            sample.metadata.update(mismatch(leaf.turn, compare))
            items.append(LeafSample(leaf, sample, spans))
    with _hook(hooks.finish):
        hooks.finish(items, metadata)
    return [item.sample for item in items]


def _picked(all_leaves: Sequence[Leaf], pick: Pick) -> list[Leaf]:
    with _hook(pick):
        picked = list(pick(tuple(all_leaves)))
        seqs = [leaf.turn.seq for leaf in picked]
    known = {leaf.turn.seq for leaf in all_leaves}
    if len(set(seqs)) != len(seqs) or not known.issuperset(seqs):
        raise HookFailed(f"pick hook {_name(pick)} must return leaves that it was given, each at most once")
    return picked


@contextmanager
def _hook(hook: Callable[..., Any]) -> Iterator[None]:
    """What a hook raises is the operator's to mend, and must not look like a defect of ours."""
    try:
        yield
    except MemoryError:  # says nothing about the hook: another time or place has more
        raise
    except Exception as error:
        raise HookFailed(f"hook {_name(hook)} raised {type(error).__name__}: {error}") from error


def _name(hook: Callable[..., Any]) -> str:
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', repr(hook))}"
