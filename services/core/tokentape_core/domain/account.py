"""What became of every sampled token of a session (INV-11).

Each turn's tokens are counted where they are trained; whatever is missing to all of them gets a reason: from
the plan of a path that holds the turn, or, where no sample's path does, from what was recorded after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokentape_contracts.accounting import Accounting, LeftOut, Reason
from tokentape_core.domain.path import PathPlan
from tokentape_core.domain.state import SessionState, Turn
from tokentape_core.domain.tree import leaves, prompt_key


@dataclass(frozen=True, slots=True)
class Trained:
    """How many tokens of a turn are trained, and by the sample of which path."""

    tokens: int
    plan: PathPlan


def trained_first(plans: Sequence[PathPlan]) -> dict[int, Trained]:
    """Seq → where the turn is trained, if the first plan that merges it trains it whole."""
    trained: dict[int, Trained] = {}
    for plan in plans:
        for piece in plan.merged:
            trained.setdefault(piece.turn.seq, Trained(piece.size, plan))
    return trained


def account(state: SessionState, plans: Sequence[PathPlan], trained: Mapping[int, Trained]) -> Accounting:
    """The session's accounting.

    Args:
        plans: of the paths that were to become samples.
        trained: seq → where the turn is trained; without those that are trained nowhere.
    """
    holding = {turn.seq: plan for plan in reversed(plans) for turn in plan.path}
    off_path = _off_path(state) if len(holding) < len(state.turns) else {}
    left_out: list[LeftOut] = []
    for turn in state.turns:
        seq, sampled = turn.seq, len(turn.event.output)
        if seq not in holding:
            left_out.append(LeftOut(seq, sampled, *off_path[seq]))
            continue
        tokens, plan = (trained[seq].tokens, trained[seq].plan) if seq in trained else (0, holding[seq])
        if tokens == sampled:
            continue
        planned = plan.left_out.get(seq, ())
        masked = sampled - tokens - sum(size for _, size in planned)
        left_out += [LeftOut(seq, size, reason) for reason, size in planned]
        left_out.append(LeftOut(seq, masked, Reason.MASKED_BY_HOOK))
    return Accounting(
        generations=len(state.turns),
        sampled_tokens=sum(len(turn.event.output) for turn in state.turns),
        trained_tokens=sum(where.tokens for where in trained.values()),
        left_out=[entry for entry in left_out if entry.tokens],
    )


def _off_path(state: SessionState) -> dict[int, tuple[Reason, int | None]]:
    """Why a sample's path would not hold a turn, and which turn took its place, by seq."""
    if state.opened.mode == "tree":
        retried = {leaf.turn.seq: leaf.retried_by for leaf in leaves(state) if leaf.retried_by is not None}
        return {
            turn.seq: (Reason.RETRIED, retried[turn.seq])
            if turn.seq in retried
            else (Reason.NOT_PICKED, None)
            for turn in state.turns
        }
    line = {turn.event.parent: turn for turn in state.head.path} if state.head else {}
    return {turn.seq: _instead(turn, line) for turn in state.turns}


def _instead(turn: Turn, line: Mapping[int, Turn]) -> tuple[Reason, int | None]:
    """Why a linear session went on without the turn, and with which one instead.

    Args:
        line: seq of a parent → its child on the path to the head; 0 is the root's parent.
    """
    branch = turn
    while branch.parent is not None and branch.parent.seq not in line:
        branch = branch.parent
    other = line.get(branch.event.parent)
    if other is None:
        return Reason.REVISED, None
    is_retried = branch is turn and prompt_key(other) == prompt_key(turn)
    return (Reason.RETRIED if is_retried else Reason.REVISED), other.seq
