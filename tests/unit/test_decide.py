"""May a session go on, and which event does a generation become?"""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import assistant, sealed, state_of, turn, user
from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, PrefixBroken, SessionDeleted, SessionFull
from tokentape_contracts.events import TurnRecorded
from tokentape_core.domain.decide import Generation, draft_turn, ensure_open, record_turn
from tokentape_core.domain.position import Head, Position
from tokentape_core.domain.request import ChatRequest
from tokentape_core.domain.state import SessionState


def test_an_open_session_takes_turns_up_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is on recorded turns; a sealed session says that it was deleted, full or not."""
    monkeypatch.setattr(limits, "TURNS_PER_SESSION", 2)
    ensure_open(state_of())
    ensure_open(state_of(turn()))
    with pytest.raises(SessionFull, match="2 turns"):
        ensure_open(state_of(turn(), turn()))
    with pytest.raises(SessionDeleted):
        ensure_open(state_of(last=sealed()))
    with pytest.raises(SessionDeleted):
        ensure_open(state_of(turn(), turn(), last=sealed()))


VOCABULARY = 100


def _record(
    state: SessionState,
    *,
    parent: int = 0,
    keep: int = 0,
    output: Any = (3, 4),
    logprobs: Any = (-0.5, 0.0),
    tools: Any = None,
    altered: tuple[int, ...] = (),
) -> TurnRecorded:
    at = Position(state.turns[parent - 1] if parent else None, [user("q")], Head(tools, {}), altered)
    generation = Generation(
        np.asarray(output, np.int32),
        np.asarray(logprobs, np.float64),
        "stop",
        "resp",
        assistant("a"),
        {"model": "m"},
        {"cached_tokens": 1},
    )
    asked = ChatRequest([user("q")], at.head, stream=False, settings={"temperature": 1}, size=0)
    return record_turn(
        draft_turn(state, asked, at, keep, np.array([9], np.int32), requested_at=1.0),
        generation,
        event_id="e",
        vocabulary=VOCABULARY,
        replay={},
        committed_at=2.0,
    )


def test_a_recorded_turn_says_what_the_engine_got_and_gave() -> None:
    """Each argument is in the event; the assistant's message follows the new ones."""
    event = _record(state_of(turn()), parent=1, keep=3, tools=["t"])
    assert (event.parent, event.keep, event.suffix.tolist()) == (1, 3, [9])
    assert (event.output.tolist(), event.logprobs.tolist()) == ([3, 4], [-0.5, 0.0])
    assert event.messages == [user("q"), assistant("a")]
    assert (event.id, event.finish, event.response_id, event.tools) == ("e", "stop", "resp", ["t"])
    assert (event.request, event.reply, event.meta) == (
        {"temperature": 1},
        {"model": "m"},
        {"cached_tokens": 1},
    )
    assert (event.requested_at, event.committed_at) == (1.0, 2.0)


@pytest.mark.parametrize(
    ("parent", "keep", "allowed"),
    [
        *[
            (1, 4, True),
            (1, 3, True),
            (1, 2, True),
            (1, 1, False),
            (1, 0, False),
            (1, 5, False),
            (1, -1, False),
        ],
        *[(0, 0, True), (0, 1, False), (0, -1, False)],
    ],
)
def test_a_prompt_keeps_its_parents_tokens(parent: int, keep: int, allowed: bool) -> None:
    """At most `max_trim_tokens` (2) of the parent's 4 tokens may be dropped, and none invented (INV-2)."""
    state = state_of(turn())
    if allowed:
        assert _record(state, parent=parent, keep=keep).keep == keep
    else:
        with pytest.raises(PrefixBroken, match=f"keeps {keep} of the parent's"):
            _record(state, parent=parent, keep=keep)


def test_a_parent_shorter_than_the_trim_is_no_licence() -> None:
    """`keep` may reach 0 but not go below, though the family may trim more than the parent has."""
    state = state_of(turn(suffix=[], output=[1]))
    assert _record(state, parent=1, keep=0).keep == 0
    with pytest.raises(PrefixBroken):
        _record(state, parent=1, keep=-1)


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [
        ([-0.5], "2 output tokens but 1 log-probs"),
        ([-0.5, -0.5, -0.5], "2 output tokens but 3 log-probs"),
        ([], "2 output tokens but 0 log-probs"),
        ([-0.5, float("nan")], "output token 1 is nan"),
        ([float("-inf"), float("nan")], "output token 0 is -inf"),
        ([float("inf"), 0.0], "output token 0 is inf"),
        ([0.0, 0.02], "output token 1 is 0.02"),
    ],
)
def test_a_generation_that_cannot_be_trained_on_is_refused(logprobs: list[float], message: str) -> None:
    """There is one finite log-prob for every output token; the error names the first that is not."""
    with pytest.raises(EngineReplyInvalid, match=message):
        _record(state_of(), logprobs=logprobs)


def test_a_log_prob_may_be_rounded_up() -> None:
    """A certain token's log-prob is 0, or a rounding above it."""
    assert _record(state_of(), logprobs=[0.0, 0.01]).logprobs.tolist() == [0.0, 0.01]


@pytest.mark.parametrize("token", [VOCABULARY, -1, 2**31 - 1])
def test_a_token_outside_of_the_vocabulary_is_refused(token: int) -> None:
    """An engine that serves another model than the tokenizer's is found by its first strange token."""
    assert _record(state_of(), output=[3, VOCABULARY - 1]).output.tolist() == [3, VOCABULARY - 1]
    with pytest.raises(
        EngineReplyInvalid, match=f"sampled token {token}, but the tokenizer has {VOCABULARY}"
    ):
        _record(state_of(), output=[3, token])


def test_a_turn_says_which_answers_came_back_altered() -> None:
    """Their places in the conversation are in the event."""
    assert _record(state_of(turn()), parent=1, keep=4, altered=(2, 5)).altered == [2, 5]
    assert _record(state_of()).altered == []


def test_an_empty_generation_is_recorded() -> None:
    """An engine that stops at once gives a turn without output."""
    assert len(_record(state_of(), output=[], logprobs=[]).output) == 0


@pytest.mark.parametrize(
    ("inherited", "in_force", "stored"),
    [
        (["a"], ["a"], None),
        (["a"], ["b"], ["b"]),
        (["a"], [], []),
        (None, None, None),
        (None, [], []),
        (None, ["a"], ["a"]),
        ([], [], None),
    ],
)
def test_tools_are_stored_only_where_they_change(inherited: Any, in_force: Any, stored: Any) -> None:
    """Tools equal to the parent's are not stored again, and reading them back gives those in force."""
    state = state_of(turn(tools=inherited))
    event = _record(state, parent=1, keep=4, tools=in_force)
    assert event.tools == stored
    assert state_of(state.turns[0].event, event).head.tools == in_force
