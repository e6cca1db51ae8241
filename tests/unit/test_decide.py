"""Where a request attaches, and which event a generation becomes."""

from typing import Any

import numpy as np
import pytest

from tests.support.sessions import assistant, sealed, state_of, turn, user
from tokentape_contracts import limits
from tokentape_contracts.errors import (
    CannotExtend,
    EngineReplyInvalid,
    PrefixBroken,
    SessionDeleted,
    SessionFull,
)
from tokentape_contracts.events import TurnRecorded
from tokentape_core.domain.decide import Generation, Position, ensure_open, position, record_turn
from tokentape_core.domain.match import strict
from tokentape_core.domain.state import SessionState

SYSTEM = {"role": "system", "content": "be brief"}
FIRST = [SYSTEM, user("q1")]
SECOND = [*FIRST, assistant("a1"), user("q2")]
THIRD = [*SECOND, assistant("a2"), user("q3")]
WHOLE = [*THIRD, assistant("a3")]


def _three_turns() -> SessionState:
    return state_of(
        turn(messages=[SYSTEM, user("q1"), assistant("a1")]),
        turn(parent=1, messages=[user("q2"), assistant("a2")]),
        turn(parent=2, messages=[user("q3"), assistant("a3")]),
    )


def _at(state: SessionState, messages: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    found = position(state, messages, strict)
    return (found.parent.seq if found.parent else 0), found.new_messages


POSITIONS: dict[str, tuple[list[dict[str, Any]], int, int]] = {
    "the next question": ([*WHOLE, user("q4")], 3, 1),
    "several new messages": ([*WHOLE, user("q4"), assistant("mine"), user("q5")], 3, 3),
    "the whole path sent again": (WHOLE, 3, 0),
    "a retry of the last turn": (THIRD, 2, 1),
    "a retry with another question": ([*THIRD[:-1], user("other")], 2, 1),
    "a retry without its question": (THIRD[:-1], 2, 0),
    "another answer than the recorded": ([*THIRD, assistant("edited"), user("q4")], 2, 3),
}


@pytest.mark.parametrize("case", POSITIONS)
def test_a_request_continues_the_deepest_turn_that_it_repeats(case: str) -> None:
    """It extends the head or steps back over one turn; what is new starts after the parent's messages."""
    messages, parent, new = POSITIONS[case]
    assert _at(_three_turns(), messages) == (parent, messages[len(messages) - new :])


def test_the_first_request_begins_a_conversation() -> None:
    """Without a turn there is no parent and everything is new, examples by the client included."""
    few_shot = [SYSTEM, user("1+1"), assistant("2"), user("2+2"), assistant("4"), user("3+3")]
    assert _at(state_of(), few_shot) == (0, few_shot)


def test_the_first_turn_may_be_retried() -> None:
    """After one turn any request may begin again, the same one or another."""
    state = state_of(turn(messages=[*FIRST, assistant("a1")]))
    assert _at(state, FIRST) == (0, FIRST)
    assert _at(state, [user("other")]) == (0, [user("other")])
    assert _at(state, []) == (0, [])


def test_either_answer_to_one_request_is_continued() -> None:
    """After a retry the newest turn is the head; one that was told the other goes on from it."""
    state = state_of(
        turn(messages=[*FIRST, assistant("old")]),
        turn(messages=[*FIRST, assistant("new")]),
    )
    assert _at(state, [*FIRST, assistant("new"), user("q2")]) == (2, [user("q2")])
    assert _at(state, [*FIRST, assistant("old"), user("q2")]) == (1, [user("q2")])


def test_a_late_answer_does_not_cut_off_what_was_told() -> None:
    """A turn that is recorded late, from an earlier parent, leaves the branch that went on continued."""
    state = state_of(
        turn(messages=[*FIRST, assistant("told")]),
        turn(parent=1, keep=4, messages=[user("q2"), assistant("a2")]),
        turn(messages=[*FIRST, assistant("late")]),
    )
    told = [*FIRST, assistant("told"), user("q2"), assistant("a2"), user("q3")]
    assert _at(state, told) == (2, [user("q3")])


def test_examples_by_the_client_are_no_turns() -> None:
    """Assistant messages in the first request belong to its turn: one cannot attach in their midst."""
    few_shot = [user("1+1"), assistant("2"), user("2+2")]
    state = state_of(
        turn(messages=[*few_shot, assistant("4")]),
        turn(parent=1, messages=[user("3+3"), assistant("6")]),
    )
    assert _at(state, [*few_shot, assistant("4"), user("9")]) == (1, [user("9")])
    with pytest.raises(CannotExtend, match="turn 0 of 2"):
        position(state, [user("1+1"), assistant("2"), user("9")], strict)


def test_the_stored_messages_stay_authoritative() -> None:
    """Only what follows the parent's path is taken from the request."""
    state = state_of(turn(messages=[user("q"), assistant("a", tool_calls=[])]))
    resent = [user("q"), {**assistant("a"), "cache_control": "x"}, user("q2")]
    assert _at(state, resent) == (1, [user("q2")])


TOO_FAR: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two turns back": (SECOND, r"turn 1 of 3: it has 4 messages, the next recorded turn ends with message 5"),
    "three turns back": (
        FIRST,
        r"turn 0 of 3: it has 2 messages, the next recorded turn ends with message 3",
    ),
    "no message": ([], r"turn 0 of 3: it has 0 messages"),
    "another system prompt": (
        [{**SYSTEM, "content": "x"}, *WHOLE[1:]],
        r"message 0 \(role 'system'\) differs",
    ),
    "another first answer": (
        [*FIRST, assistant("x"), *WHOLE[3:]],
        r"turn 0 of 3: message 2 \(role 'assistant'\) differs from the recorded one",
    ),
    "another second question": ([*SECOND[:-1], user("x")], r"turn 1 of 3: message 3 \(role 'user'\) differs"),
    "another second answer": (
        [*SECOND, assistant("x"), user("q3")],
        r"turn 1 of 3: message 4 \(role 'assistant'\) differs",
    ),
}


@pytest.mark.parametrize("case", TOO_FAR)
def test_a_longer_jump_is_refused(case: str) -> None:
    """The error says how far the request agrees and which message is the first that does not."""
    messages, text = TOO_FAR[case]
    with pytest.raises(CannotExtend, match=text) as caught:
        position(_three_turns(), messages, strict)
    assert "may step back over 1 turn" in caught.value.detail


def test_a_request_is_not_changed() -> None:
    """Positioning hands out a copy of the list."""
    messages = [*WHOLE, user("q4")]
    position(_three_turns(), messages, strict).new_messages.clear()
    assert len(messages) == len(WHOLE) + 1


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


def _record(
    state: SessionState,
    *,
    parent: int = 0,
    keep: int = 0,
    output: Any = (3, 4),
    logprobs: Any = (-0.5, 0.0),
    tools: Any = None,
) -> TurnRecorded:
    at = Position(state.turns[parent - 1] if parent else None, [user("q")])
    generation = Generation(
        np.asarray(output, np.int32),
        np.asarray(logprobs, np.float64),
        "stop",
        "resp",
        assistant("a"),
        {"model": "m"},
        {"cached_tokens": 1},
    )
    return record_turn(
        state,
        at,
        keep,
        np.array([9], np.int32),
        generation,
        event_id="e",
        tools=tools,
        request={"temperature": 1},
        replay={},
        requested_at=1.0,
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
    ],
)
def test_a_generation_that_cannot_be_trained_on_is_refused(logprobs: list[float], message: str) -> None:
    """There is one finite log-prob for every output token; the error names the first that is not."""
    with pytest.raises(EngineReplyInvalid, match=message):
        _record(state_of(), logprobs=logprobs)


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
