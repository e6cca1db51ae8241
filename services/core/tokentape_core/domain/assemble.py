"""Assembly: what a samples request gives of a session.

`path` turns one root-to-leaf path into a sample; here it is decided of which paths there is one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tokentape_contracts.accounting import Accounting
from tokentape_contracts.errors import HookFailed, PrefixBroken
from tokentape_contracts.samples import Sample, Status
from tokentape_contracts.tokens import first_bad_log_prob
from tokentape_core.domain.account import Trained, account, trained_first
from tokentape_core.domain.path import Decode, PathPlan, path_sample, plan_path
from tokentape_core.domain.replay import Stored
from tokentape_core.domain.state import SessionState, Turn
from tokentape_core.domain.tree import (
    DEFAULT_HOOKS,
    Finish,
    Hooks,
    Leaf,
    LeafSample,
    Pick,
    leaf_metadata,
    leaves,
    unretried,
)
from tokentape_core.domain.view import Compare, mismatch, session_metadata

NOTHING_STORED: Final[Stored] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class Assembly:
    """What one samples request gives.

    Attributes:
        samples: in order.
        session_metadata: about the whole session.
        accounting: what became of every sampled token; also in `session_metadata`.
        empty_reason: why there is no sample, or None.
        picked: leaves that were to become samples, the too long ones included.
    """

    samples: list[Sample]
    session_metadata: dict[str, Any]
    accounting: Accounting
    empty_reason: str | None = None
    picked: int = 0


def assemble(
    state: SessionState,
    decode: Decode,
    *,
    max_seq_len: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    session_id: str = "",
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
        session_id: for the samples' metadata.
        compare: compares a path's tokens with the chat template's rendering.
        stored: the bytes of the routing replay rows of `replay_turns`.

    Raises:
        PrefixBroken: a turn's prompt does not begin with its parent's tokens.
        HookFailed: a hook raised or broke its contract.
        ReplayBroken, StreamCorrupt: see `sample_rows`.
    """
    picked = _picked(leaves(state), hooks.pick) if state.opened.mode == "tree" else _line(state)
    plans = [plan_path(leaf.path, state.opened, max_seq_len) for leaf in picked]
    fitting = [(leaf, plan) for leaf, plan in zip(picked, plans, strict=True) if plan.merged]
    items = [
        LeafSample(leaf, path_sample(plan, state.opened, decode, stored), plan.spans)
        for leaf, plan in fitting
    ]
    for item in items:
        item.sample.metadata["session_id"] = session_id
    if state.opened.mode == "tree":
        _finish(items, hooks.finish, metadata or {}, compare)
        trained = _trained(items, [plan for _, plan in fitting], hooks.finish)
    else:
        trained = trained_first(plans)
    accounting = account(state, plans, trained)
    about = session_metadata(state, accounting, compare)
    empty_reason = None if items else "all_truncated" if state.turns else "no_records"
    return Assembly([item.sample for item in items], about, accounting, empty_reason, len(picked))


def expected_accounting(state: SessionState) -> Accounting | None:
    """What a collect without `max_seq_len` and with the default hooks would account for.

    None if that would be refused, because a turn's prompt does not begin with its parent's tokens.
    """
    picked = unretried(leaves(state)) if state.opened.mode == "tree" else _line(state)
    try:
        plans = [plan_path(leaf.path, state.opened, None) for leaf in picked]
    except PrefixBroken:
        return None
    by_seq = sorted(plans, key=lambda plan: plan.path[-1].seq)  # as `train_once` does
    return account(state, plans, trained_first(by_seq))


def replay_turns(state: SessionState) -> list[Turn]:
    """The turns whose routing replay rows an assembly may need."""
    if state.opened.mode == "tree":
        turns: Sequence[Turn] = state.turns
    else:
        turns = state.head.path if state.head else ()
    return [turn for turn in turns if turn.event.replay]


def _line(state: SessionState) -> list[Leaf]:
    """The one leaf of a linear session: the newest turn."""
    return [Leaf(state.head, is_last_child=True)] if state.head else []


def _finish(
    items: Sequence[LeafSample], finish: Finish, metadata: Mapping[str, Any], compare: Compare | None
) -> None:
    """Says of each sample of a tree which leaf it is, and lets the hook change them."""
    for item in items:
        item.sample.metadata["accumulated_token_ids"] = item.leaf.turn.tokens
        item.sample.metadata["leaf"] = leaf_metadata(item.leaf)
        item.sample.metadata.update(mismatch(item.leaf.turn, compare))
    with _hook(finish):
        finish(tuple(items), metadata)


def _trained(items: Sequence[LeafSample], plans: Sequence[PathPlan], finish: Finish) -> dict[int, Trained]:
    """Seq → where the turn is trained, as the loss masks say after the hook.

    Raises:
        HookFailed: the hook left something that is no sample, or trains a turn in two samples, or a token
            that was not sampled.
    """
    trained: dict[int, Trained] = {}
    for item, plan in zip(items, plans, strict=True):
        mask = _mask(item, finish)
        for piece in plan.merged:
            seq = piece.turn.seq
            if not (tokens := int(np.count_nonzero(mask[item.spans[seq]]))):
                continue
            if seq in trained:
                raise HookFailed(
                    f"after finish hook {name_of(finish)} turn {seq} is trained in two samples: mask it in "
                    "all but one, as tokentape_core.domain.tree.train_once does"
                )
            trained[seq] = Trained(tokens, plan)
    return trained


def _mask(item: LeafSample, finish: Finish) -> NDArray[np.bool_]:
    """bool[R]: which tokens of the sample's response are trained."""
    sample, hook = item.sample, f"finish hook {name_of(finish)}"
    where = f"in the sample of leaf {item.leaf.node_id}"
    try:
        given = np.asarray(sample.loss_mask)
        log_probs = np.asarray(sample.rollout_log_probs, np.float64)
        lengths = (len(given), len(log_probs), sample.response_length, len(sample.tokens))
    except (TypeError, ValueError, OverflowError) as error:
        raise HookFailed(f"{hook} left no arrays {where}: {error}") from error
    are_flat = given.ndim == log_probs.ndim == 1 and given.dtype.kind in "biuf"
    if not are_flat or type(sample.response_length) is not int:
        raise HookFailed(
            f"{hook} left no flat loss_mask and rollout_log_probs of numbers, or a response_length that is "
            f"no integer, {where}"
        )
    if len(set(lengths[:3])) > 1 or lengths[2] > lengths[3]:
        raise HookFailed(
            f"{hook} left arrays of unequal lengths {where}: {lengths[0]} of loss_mask, {lengths[1]} of "
            f"rollout_log_probs, response_length {lengths[2]}, {lengths[3]} tokens"
        )
    if (place := first_bad_log_prob(log_probs)) is not None:
        raise HookFailed(f"{hook} left the log-prob {log_probs[place]} {where}")
    if not isinstance(sample.status, Status) or not isinstance(sample.metadata, dict):
        raise HookFailed(f"{hook} left a status or metadata of another type {where}")
    mask: NDArray[np.bool_] = given != 0
    if np.count_nonzero(mask) != sum(np.count_nonzero(mask[span]) for span in item.spans.values()):
        raise HookFailed(
            f"after {hook} tokens that no model sampled are trained {where}: its loss mask may be 1 on "
            "sampled tokens only"
        )
    return mask


def _picked(all_leaves: Sequence[Leaf], pick: Pick) -> list[Leaf]:
    with _hook(pick):
        picked = list(pick(tuple(all_leaves)))
    chosen, known = {id(leaf) for leaf in picked}, {id(leaf) for leaf in all_leaves}
    if len(chosen) != len(picked) or not known.issuperset(chosen):
        raise HookFailed(f"pick hook {name_of(pick)} must return leaves that it was given, each at most once")
    return picked


@contextmanager
def _hook(hook: Callable[..., Any]) -> Iterator[None]:
    """What a hook raises is the operator's to mend, and must not look like a defect of ours."""
    try:
        yield
    except MemoryError:  # says nothing about the hook: another time or place has more
        raise
    except (Exception, SystemExit) as error:
        raise HookFailed(f"hook {name_of(hook)} raised {type(error).__name__}: {error}") from error


def name_of(hook: Callable[..., Any]) -> str:
    """What errors call a hook: its import path."""
    return f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', repr(hook))}"
