"""The reasons for which sampled tokens are not trained, one by one."""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.accounting import Accounting, LeftOut, Reason
from tokentape_contracts.events import Blob, ReplaySpec, TurnRecorded
from tokentape_core.domain.assemble import assemble, expected_accounting
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks, superseded


def step(parent: int, keep: int, *, prompt: int = 9, sampled: int = 2, **given: Any) -> TurnRecorded:
    """A turn of one prompt token behind `keep` of its parent's, and so many sampled ones."""
    return turn(parent=parent, keep=keep, suffix=[prompt], output=list(range(10, 10 + sampled)), **given)


def accounting(
    *events: TurnRecorded, mode: str = "linear", hooks: Hooks = DEFAULT_HOOKS, **given: Any
) -> Accounting:
    options = {name: given.pop(name) for name in ("max_seq_len",) if name in given}
    state = state_of(*events, first=opened(mode=mode, max_trim_tokens=1, **given))
    return assemble(state, lambda ids: "", hooks=hooks, **options).accounting


def test_nothing_is_left_out_of_a_plain_session() -> None:
    """Every token that was sampled is trained."""
    assert accounting(step(0, 0), step(1, 3)) == Accounting(2, 4, 4, [])
    assert accounting() == Accounting(0, 0, 0, [])


@pytest.mark.parametrize("mode", ["linear", "tree"])
def test_a_retry(mode: str) -> None:
    """The turn whose input another repeated is left out for that one."""
    events = [step(0, 0), step(1, 3), step(1, 3), step(3, 6)]
    assert accounting(*events, mode=mode).left_out == [LeftOut(2, 2, Reason.RETRIED, 3)]


def test_the_first_of_three_equal_turns_goes_on() -> None:
    """On a line the retried turns are those that it did not go on from, whichever came first."""
    events = [step(0, 0), step(0, 0), step(0, 0), step(1, 3)]
    assert accounting(*events).left_out == [
        LeftOut(2, 2, Reason.RETRIED, 1),
        LeftOut(3, 2, Reason.RETRIED, 1),
    ]
    # In a tree the last of them is a leaf that nothing repeats.
    assert accounting(*events, mode="tree").left_out == [LeftOut(2, 2, Reason.RETRIED, 3)]


def test_a_revision() -> None:
    """A line that went on with other messages names the turn that it went on with; a tree trains both."""
    events = [step(0, 0), step(1, 3), step(1, 3, prompt=8)]
    assert accounting(*events).left_out == [LeftOut(2, 2, Reason.REVISED, 3)]
    assert accounting(*events, mode="tree").left_out == []


def test_what_follows_a_revised_turn_is_revised_with_it() -> None:
    """A late turn behind one that the line left is named with the turn that the line went on with."""
    events = [step(0, 0), step(1, 3), step(1, 3, prompt=8), step(3, 6), step(2, 6)]
    assert accounting(*events).left_out == [
        LeftOut(2, 2, Reason.REVISED, 3),
        LeftOut(5, 2, Reason.REVISED, 3),
    ]


def test_a_side_request_that_ends_late() -> None:
    """It is left out, and not the conversation that it was beside."""
    events = [step(0, 0), step(1, 3), step(2, 6), step(0, 0, prompt=8)]
    assert accounting(*events) == Accounting(4, 8, 6, [LeftOut(4, 2, Reason.REVISED, 1)])


def test_what_a_hook_does_not_pick() -> None:
    """A branch that the pick hook drops is named so, unless it was retried."""
    events = [step(0, 0), step(1, 3), step(1, 3, prompt=8), step(1, 3, prompt=8)]
    hooks = Hooks(superseded, DEFAULT_HOOKS.finish)
    assert accounting(*events, mode="tree", hooks=hooks).left_out == [
        LeftOut(2, 2, Reason.NOT_PICKED),
        LeftOut(3, 2, Reason.RETRIED, 4),
    ]


def test_what_a_hook_masks() -> None:
    """Tokens that stand in a sample and are not trained there were masked by the finish hook."""

    def mask_half(samples: Any, _: Any) -> None:
        samples[0].sample.loss_mask[1] = 0

    hooks = Hooks(DEFAULT_HOOKS.pick, mask_half)
    assert accounting(step(0, 0), mode="tree", hooks=hooks).left_out == [LeftOut(1, 1, Reason.MASKED_BY_HOOK)]


@pytest.mark.parametrize(
    ("max_seq_len", "left_out"),
    [
        (6, []),
        (5, [LeftOut(2, 1, Reason.OVER_MAX_SEQ_LEN)]),
        (4, [LeftOut(2, 2, Reason.OVER_MAX_SEQ_LEN)]),
        (2, [LeftOut(1, 1, Reason.OVER_MAX_SEQ_LEN), LeftOut(2, 2, Reason.OVER_MAX_SEQ_LEN)]),
        (1, [LeftOut(1, 2, Reason.OVER_MAX_SEQ_LEN), LeftOut(2, 2, Reason.OVER_MAX_SEQ_LEN)]),
    ],
)
def test_what_is_too_long(max_seq_len: int, left_out: list[LeftOut]) -> None:
    """Tokens beyond the limit, and turns behind a cut one."""
    assert accounting(step(0, 0), step(1, 3), max_seq_len=max_seq_len).left_out == left_out


@pytest.mark.parametrize("finish", ["length", "abort", "content_filter"])
def test_what_follows_a_turn_that_did_not_complete(finish: str) -> None:
    """The sample ends with such a turn."""
    events = [step(0, 0, finish=finish), step(1, 3), step(2, 6)]
    assert accounting(*events).left_out == [LeftOut(2, 2, Reason.AFTER_CUT), LeftOut(3, 2, Reason.AFTER_CUT)]


def test_what_lost_its_replay_rows() -> None:
    """The sample ends before a turn without the rows that the one before had."""
    spec = {"routed_experts": ReplaySpec(rows="full", layers=1, prefix="latest")}
    blob = Blob(start=0, rows=2, layers=1, topk=1, dtype="u1", stored=(), parts=0)
    events = [step(0, 0, replay={"routed_experts": blob}), step(1, 3), step(2, 6)]
    said = expected_accounting(state_of(*events, first=opened(replay=spec)))
    assert said is not None
    assert said.left_out == [
        LeftOut(2, 2, Reason.REPLAY_ROWS_MISSING),
        LeftOut(3, 2, Reason.REPLAY_ROWS_MISSING),
    ]


def test_what_the_next_prompt_did_not_keep() -> None:
    """A stop token for which the template writes another one is trimmed; one that it writes again is not."""
    assert accounting(step(0, 0), step(1, 2)).left_out == [LeftOut(1, 1, Reason.TRIMMED)]
    again = turn(parent=1, keep=2, suffix=[11, 9], output=[10])
    assert accounting(step(0, 0), again).left_out == []


def test_a_turn_without_output_is_not_named() -> None:
    """Nothing was sampled, hence nothing is left out; the sample is cut all the same if it was too long."""
    events = [step(0, 0), step(0, 0, sampled=0), step(2, 1)]
    assert accounting(*events).left_out == [LeftOut(1, 2, Reason.RETRIED, 2)]
    state = state_of(step(0, 0), step(1, 3, sampled=0))
    assembly = assemble(state, lambda ids: "", max_seq_len=3)
    assert (assembly.accounting.left_out, assembly.samples[0].status) == ([], "truncated")


def test_a_broken_prefix_has_no_expected_accounting() -> None:
    """GET still shows such a session, without what a collect would refuse to say."""
    broken = turn(parent=1, keep=0, suffix=np.array([7, 7]), output=[8])
    assert expected_accounting(state_of(step(0, 0), broken, first=opened(max_trim_tokens=0))) is None
