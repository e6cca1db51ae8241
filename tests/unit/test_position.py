"""Where a request attaches: what it repeats, steps back over, alters, or begins anew."""

from typing import Any

import pytest

from tests.support.sessions import assistant, opened, state_of, turn, user
from tokentape_contracts import limits
from tokentape_contracts.errors import AnswerAltered, CannotExtend, HeadChanged, TurnTruncated
from tokentape_core.domain.match import equivalent, strict
from tokentape_core.domain.position import Head, Position
from tokentape_core.domain.position import position as find
from tokentape_core.domain.state import SessionState

NO_HEAD = Head(None, {})


def position(state: SessionState, messages: list[dict[str, Any]], matcher: Any = strict) -> Position:
    return find(state, messages, matcher, NO_HEAD)


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
    found = position(state, messages)
    return (found.parent.seq if found.parent else 0), found.new_messages


POSITIONS: dict[str, tuple[list[dict[str, Any]], int, int]] = {
    "the next question": ([*WHOLE, user("q4")], 3, 1),
    "several new messages": ([*WHOLE, user("q4"), assistant("mine"), user("q5")], 3, 3),
    "the whole path sent again": (WHOLE, 3, 0),
    "a retry of the last turn": (THIRD, 2, 1),
    "a retry with another question": ([*THIRD[:-1], user("other")], 2, 1),
    "a retry without its question": (THIRD[:-1], 2, 0),
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
    assert _at(state, [user("a title?"), user("please")]) == (0, [user("a title?"), user("please")])


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
    with pytest.raises(CannotExtend, match="continues turn 0, and the session has gone on to turn 2"):
        position(state, [user("1+1"), assistant("2"), user("9")])


def test_the_stored_messages_stay_authoritative() -> None:
    """Only what follows the parent's path is taken from the request."""
    state = state_of(turn(messages=[user("q"), assistant("a", tool_calls=[])]))
    resent = [user("q"), {**assistant("a"), "cache_control": "x"}, user("q2")]
    assert _at(state, resent) == (1, [user("q2")])


TOO_FAR: dict[str, tuple[list[dict[str, Any]], str]] = {
    "two turns back": (
        SECOND,
        r"turn 1, .* gone on to turn 3: it has 4 messages, turn 2 ends with message 4",
    ),
    "three turns back": (FIRST, r"turn 0, .* to turn 3: it has 2 messages, turn 1 ends with message 2"),
    "no message": ([], r"turn 0, .* to turn 3: it has 0 messages"),
    "another system prompt": (
        [{**SYSTEM, "content": "x"}, *WHOLE[1:]],
        r"message 0 \(role 'system'\) differs",
    ),
    "another second question": ([*SECOND[:-1], user("x")], r"turn 1, .*: message 3 \(role 'user'\) differs"),
}


@pytest.mark.parametrize("case", TOO_FAR)
def test_a_longer_jump_is_refused(case: str) -> None:
    """The error says how far the request agrees and which message is the first that does not."""
    messages, text = TOO_FAR[case]
    with pytest.raises(CannotExtend, match=text) as caught:
        position(_three_turns(), messages)
    assert "may step back over its newest turn, and no further" in caught.value.detail


def test_a_request_is_not_changed() -> None:
    """Positioning hands out a copy of the list."""
    messages = [*WHOLE, user("q4")]
    position(_three_turns(), messages).new_messages.clear()
    assert len(messages) == len(WHOLE) + 1


ALTERED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "the newest": (
        [*THIRD, assistant("edited"), user("q4")],
        'message 6 is not what turn 3 answered: content was "a3" and is "edited"',
    ),
    "the first": (
        [*FIRST, assistant("x"), *WHOLE[3:]],
        'message 2 is not what turn 1 answered: content was "a1" and is "x"',
    ),
    "one in the midst": (
        [*SECOND, assistant("x"), user("q3")],
        'message 4 is not what turn 2 answered: content was "a2" and is "x"',
    ),
    "and nothing after it": ([*THIRD, assistant("edited")], "message 6 is not what turn 3 answered"),
}


@pytest.mark.parametrize("case", ALTERED)
def test_an_altered_answer_is_refused(case: str) -> None:
    """Whichever answer of a linear session comes back as another, the error names it, and both values."""
    messages, text = ALTERED[case]
    with pytest.raises(AnswerAltered) as caught:
        position(_three_turns(), messages)
    assert text in caught.value.detail


def test_an_altered_answer_may_be_kept_as_recorded() -> None:
    """A session that was opened so goes on from the recorded answer, and the position says where."""
    state = state_of(*(t.event for t in _three_turns().turns), first=opened(altered_answer="keep"))
    once = position(state, [*FIRST, assistant("x"), *WHOLE[3:], user("q4")])
    assert (once.parent, once.new_messages, once.altered) == (state.head, [user("q4")], (2,))
    twice = position(state, [*FIRST, assistant("x"), *WHOLE[3:-1], assistant("y"), user("q4")])
    assert (twice.parent, twice.new_messages, twice.altered) == (state.head, [user("q4")], (2, 6))
    assert position(state, [*WHOLE, user("q4")]).altered == ()


def test_keeping_is_for_answers_only() -> None:
    """Another question is a revision or too far back, also in a session that keeps recorded answers."""
    state = state_of(*(t.event for t in _three_turns().turns), first=opened(altered_answer="keep"))
    revised = position(state, [*THIRD[:-1], user("other")])
    assert (revised.parent, revised.new_messages) == (state.turns[1], [user("other")])
    with pytest.raises(CannotExtend):
        position(state, [*SECOND[:-1], user("x"), *WHOLE[4:], user("q4")])


def test_an_altered_answer_begins_a_new_root_of_a_tree() -> None:
    """It is no continuation of anything that was sampled, nor of the turn before it."""
    state = state_of(*(t.event for t in _three_turns().turns), first=opened(mode="tree"))
    for messages in ([*THIRD, assistant("edited"), user("q4")], [*FIRST, assistant("x"), *WHOLE[3:]]):
        at = position(state, messages)
        assert (at.parent, at.new_messages, at.root) == (None, messages, "unmatched")


def test_a_clients_own_answer_follows_a_turn_of_a_tree() -> None:
    """An assistant message where nothing was sampled is prompt text of a child."""
    state = state_of(*(t.event for t in _three_turns().turns), first=opened(mode="tree"))
    new = [assistant("No response requested."), user("q4")]
    at = position(state, [*WHOLE, *new])
    assert (at.parent, at.new_messages) == (state.head, new)


def test_another_question_with_an_answer_of_its_own_is_refused() -> None:
    """Stepping back over a turn must not drop its answer for one that the client brings."""
    with pytest.raises(
        CannotExtend, match=r"message 5 .* an assistant message stands where the answer of turn 3"
    ):
        position(_three_turns(), [*SECOND, assistant("a2"), user("other"), assistant("a3"), user("q4")])


def test_a_cut_turn_of_a_tree_is_not_continued() -> None:
    """What follows it would not be what the model meant to say; its retry is fine."""
    state = state_of(turn(messages=WHOLE[:3], finish="length"), first=opened(mode="tree"))
    with pytest.raises(TurnTruncated, match="turn 1"):
        position(state, [*WHOLE[:3], user("q2")])
    assert position(state, FIRST).parent is None


CALL = {"type": "function", "function": {"name": "ls", "arguments": "{}"}}


def _calls(*ids: str) -> dict[str, Any]:
    return assistant("", tool_calls=[{**CALL, "id": call_id} for call_id in ids])


def _tool(call_id: str, text: str = "ok") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _two_calls() -> SessionState:
    return state_of(
        turn(messages=[user("q"), _calls("a1", "a2")]),
        turn(parent=1, messages=[_tool("a1"), _tool("a2"), _calls("a1")]),
    )


def test_what_follows_gets_the_recorded_ids() -> None:
    """Ids that the request renamed consistently are translated back, those of new tool messages too."""
    said = [user("q"), _calls("x", "y"), _tool("x"), _tool("y"), _calls("z"), _tool("z"), _tool("y", "late")]
    at = position(_two_calls(), said, equivalent)
    assert at.parent is not None
    assert (at.parent.seq, at.new_messages) == (2, [_tool("a1"), _tool("a2", "late")])
    swapped = [user("q"), _calls("a2", "a1"), _tool("a2"), _tool("a1"), _calls("a2"), _tool("a2")]
    assert position(_two_calls(), swapped, equivalent).new_messages == [_tool("a1")]


@pytest.mark.parametrize(
    "said",
    [
        [_calls("x", "x"), _tool("x"), _tool("x"), _calls("z")],
        [_calls("x", "y"), _tool("y"), _tool("x"), _calls("z")],
        [_calls("a1", "a1"), _tool("a1"), _tool("a1"), _calls("z")],
    ],
    ids=["one for two", "answers swapped", "two alike"],
)
def test_ids_that_are_not_renamed_consistently_are_a_contradiction(said: list[dict[str, Any]]) -> None:
    """A tool message that answers another call than the recorded one says something else."""
    with pytest.raises((AnswerAltered, CannotExtend)):
        position(_two_calls(), [user("q"), *said, user("next")], equivalent)


def test_strict_matchers_take_no_other_ids() -> None:
    """Only `equivalent` translates them."""
    with pytest.raises(AnswerAltered, match="tool_calls"):
        position(state_of(turn(messages=[user("q"), _calls("a1")])), [user("q"), _calls("x"), _tool("x")])


TOOL = {"type": "function", "function": {"name": "ls", "parameters": {"a": 1, "b": 2}}}
OTHER = {"type": "function", "function": {"name": "cat"}}
RECORDED = {"chat_template_kwargs": {"enable_thinking": True}}
SAME_HEADS = {
    "left out": Head(None, {}),
    "emptied": Head([], {}),
    "the same": Head([TOOL, OTHER], {"enable_thinking": True}),
    "in another order": Head([OTHER, TOOL], {}),
    "keys in another order": Head(
        [{"function": {"parameters": {"b": 2, "a": 1}, "name": "ls"}, "type": "function"}, OTHER], {}
    ),
}
OTHER_HEADS = {
    "tool 'new' is new": Head([TOOL, OTHER, {"function": {"name": "new"}}], {}),
    "tool 'cat' is gone": Head([TOOL], {}),
    "tool 'ls' differs": Head([{**TOOL, "function": {"name": "ls"}}, OTHER], {}),
    "template argument 'enable_thinking' was true and is false": Head(None, {"enable_thinking": False}),
    "template argument 'reasoning_effort' is new: \"high\"": Head(None, {"reasoning_effort": "high"}),
}


def _with_head(mode: str) -> SessionState:
    first = turn(messages=WHOLE[:3], tools=[TOOL, OTHER], request=RECORDED)
    return state_of(first, first=opened(mode=mode))


@pytest.mark.parametrize("mode", ["linear", "tree"])
@pytest.mark.parametrize("case", SAME_HEADS)
def test_the_head_is_kept(mode: str, case: str) -> None:
    """What a request leaves out, or spells in another order, stays as the conversation began."""
    at = find(_with_head(mode), SECOND, strict, SAME_HEADS[case])
    assert at.parent is not None
    assert at.head == Head([TOOL, OTHER], {"enable_thinking": True})


@pytest.mark.parametrize("case", OTHER_HEADS)
def test_another_head_is_refused_on_a_line(case: str) -> None:
    """The error names what changed."""
    with pytest.raises(HeadChanged) as caught:
        find(_with_head("linear"), SECOND, strict, OTHER_HEADS[case])
    assert caught.value.detail.startswith(case)


@pytest.mark.parametrize("case", OTHER_HEADS)
def test_another_head_begins_a_new_root_of_a_tree(case: str) -> None:
    """The whole conversation is rendered with it; what the request leaves out is as it was."""
    asked = OTHER_HEADS[case]
    at = find(_with_head("tree"), SECOND, strict, asked)
    assert (at.parent, at.new_messages, at.root) == (None, SECOND, "head_changed")
    assert at.head.tools == (asked.tools or [TOOL, OTHER])
    assert at.head.template_kwargs == {"enable_thinking": True, **asked.template_kwargs}


def test_another_first_request_may_have_another_head() -> None:
    """A title request before the first real one fixes nothing for it."""
    asked = Head([OTHER], {})
    at = find(_with_head("linear"), [user("the real question")], strict, asked)
    assert (at.parent, at.head, at.root) == (None, asked, "unmatched")


def test_a_long_value_is_quoted_in_part() -> None:
    """Both values are cut at the same place, a little before they part."""
    recorded, sent = "a" * 500 + "X" + "b" * 500, "a" * 500 + "Y" + "b" * 500
    state = state_of(turn(messages=[user("q"), assistant(recorded)]))
    with pytest.raises(AnswerAltered) as caught:
        position(state, [user("q"), assistant(sent), user("next")])
    before, after = (f"…{'a' * 30}{c}{'b' * 89}…" for c in "XY")
    assert f"content was {before} and is {after}." in caught.value.detail
    assert len(before) - 2 == limits.QUOTED_VALUE_CHARS


DEMO = [SYSTEM, user("1+1"), assistant("2"), user("2+2")]
"""A first request with an example of the client's."""


@pytest.mark.parametrize(
    "said",
    [
        [*DEMO, user("that was no number; try again")],
        [*DEMO[:-1], user("2+3")],
        [*DEMO[:-1], user("2+2"), user("please")],
    ],
    ids=["asked again", "another question", "one more message"],
)
def test_examples_by_the_client_do_not_hinder_a_revision(said: list[dict[str, Any]]) -> None:
    """Assistant messages that the turn's own input holds are no answer in the place of the turn's."""
    state = state_of(turn(messages=[*DEMO, assistant("bad")]))
    assert _at(state, said) == (0, said)


def test_an_answer_that_moved_is_not_stepped_over() -> None:
    """A client that puts a message before the answer has not dropped it: nothing is left out silently."""
    reminder = user("a reminder")
    with pytest.raises(CannotExtend, match="which would be lost"):
        position(
            state_of(turn(messages=[*FIRST, assistant("a1")])), [*FIRST, reminder, assistant("a1"), user("n")]
        )
    with pytest.raises(CannotExtend, match="which would be lost"):
        position(_three_turns(), [*THIRD, reminder, assistant("a3"), user("n")])


def test_a_recorded_answer_is_found_before_one_is_kept() -> None:
    """In a session that keeps answers, one that another turn gave is that turn's and not an altered one."""
    state = state_of(
        turn(messages=[*FIRST, assistant("first")]),
        turn(messages=[*FIRST, assistant("second")]),
        first=opened(altered_answer="keep"),
    )
    at = position(state, [*FIRST, assistant("first"), user("q2")])
    assert (at.parent, at.altered) == (state.turns[0], ())
    at = position(state, [*FIRST, assistant("third"), user("q2")])
    assert (at.parent, at.altered) == (state.turns[1], (2,))


def test_an_altered_answer_is_named_once() -> None:
    """Clients send their version with every request again; only the first turn that keeps it says so."""
    state = state_of(
        turn(messages=[*FIRST, assistant("a1")]),
        turn(parent=1, messages=[user("q2"), assistant("a2")], altered=[2]),
        first=opened(altered_answer="keep"),
    )
    said = [*FIRST, assistant("x"), user("q2"), assistant("a2"), user("q3")]
    assert position(state, said).altered == ()
    assert position(state, [*said[:4], assistant("y"), user("q3")]).altered == (4,)
    # A retry behind an answer that is kept.
    assert position(state, said[:4]).parent is state.turns[0]


def test_a_late_turn_is_not_what_the_session_came_to() -> None:
    """A side request that ends after the conversation has gone on begins nothing, and is no head."""
    title = turn(messages=[user("a title?"), assistant("Title")])
    state = state_of(
        turn(messages=[*FIRST, assistant("a1")]),
        turn(parent=1, keep=4, messages=[user("q2"), assistant("a2")]),
        title,
    )
    assert state.head is state.turns[1]
    assert _at(state, [*SECOND, assistant("a2"), user("q3")]) == (2, [user("q3")])
    beside = state_of(turn(messages=[*FIRST, assistant("a1")]), title)
    assert beside.head is beside.turns[1]
    assert _at(beside, [*FIRST, assistant("a1"), user("q2")]) == (1, [user("q2")])


def test_of_equal_turns_the_one_with_the_requests_head_is_continued() -> None:
    """Two answers alike to requests with other tools are not the same conversation."""
    said = [*FIRST, assistant("ok")]
    for mode in ("linear", "tree"):
        state = state_of(
            turn(messages=said, tools=[TOOL]), turn(messages=said, tools=[OTHER]), first=opened(mode=mode)
        )
        for tool, parent in ((TOOL, 1), (OTHER, 2)):
            at = find(state, [*said, user("n")], strict, Head([tool], {}))
            assert (at.parent, at.root) == (state.turns[parent - 1], None)


def test_calls_of_the_client_keep_their_ids() -> None:
    """A call in an answer that the client brings is its own, though its id was another one's before."""
    state = state_of(turn(messages=[user("q"), _calls("abc")]))
    said = [user("q"), _calls("c0"), _tool("c0"), _calls("c0"), _tool("c0", "mine"), user("n")]
    new = position(state, said, equivalent).new_messages
    assert new == [_tool("abc"), _calls("c0"), _tool("c0", "mine"), user("n")]


def test_one_recorded_id_for_two_calls() -> None:
    """Where an engine gave two calls one id, a client may tell them apart."""
    state = state_of(turn(messages=[user("q"), _calls("a", "a")]))
    new = position(state, [user("q"), _calls("x", "y"), _tool("x"), _tool("y")], equivalent).new_messages
    assert new == [_tool("a"), _tool("a")]


SPELLINGS = {
    "a mark is gone": [{**TOOL, "cache_control": {"type": "ephemeral"}}, OTHER],
    "a null has come": [{**TOOL, "function": {**TOOL["function"], "strict": None}}, OTHER],
    "listed twice": [TOOL, OTHER, OTHER],
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_a_tool_may_be_spelled_differently(case: str) -> None:
    """What says nothing of a tool is no other head, whichever of the two requests has it."""
    plain = [TOOL, OTHER]
    for recorded, asked in ((plain, SPELLINGS[case]), (SPELLINGS[case], plain)):
        state = state_of(turn(messages=WHOLE[:3], tools=recorded))
        assert find(state, SECOND, strict, Head(asked, {})).head.tools == recorded


def test_many_roots_with_one_history_are_told_apart_by_their_answers() -> None:
    """A tree of rewritten histories costs a comparison of answers for each root, not of whole histories."""
    asked: list[Any] = []

    def counting(stored: Any, incoming: Any) -> bool:
        asked.append(stored)
        return strict(stored, incoming)

    history: list[dict[str, Any]] = []
    events = []
    for number in range(50):
        history.append(user(f"q{number}"))
        events.append(turn(messages=[*history, assistant(f"a{number}")]))
        history.append(assistant(f"rewritten {number}"))
    state = state_of(*events, first=opened(mode="tree"))
    assert position(state, [*history, user("n")], counting).parent is None
    assert len(asked) <= 2 * len(events)


def test_a_turn_without_messages_is_passed_over() -> None:
    """A stream of another writer's may hold such a turn; it alters nothing."""
    state = state_of(turn(messages=[]))
    assert position(state, FIRST).parent is state.head


def test_of_equal_answers_the_one_on_the_line_is_stepped_back_to() -> None:
    """A duplicate that was answered alike, and late, does not stand between the line and its own retry."""
    state = state_of(
        turn(messages=[*FIRST, assistant("ok")]),
        turn(messages=[*FIRST, assistant("ok")]),
        turn(parent=1, keep=4, messages=[user("b"), assistant("x")]),
    )
    said = [*FIRST, assistant("ok")]
    for new in (user("b"), user("c")):
        assert _at(state, [*said, new]) == (1, [new])


def test_of_answers_that_are_kept_the_one_on_the_line_is_stepped_back_to() -> None:
    """Where two recorded answers could be the altered one, the session has gone on from one of them."""
    state = state_of(
        turn(messages=[*FIRST, assistant("one")]),
        turn(messages=[*FIRST, assistant("two")]),
        turn(parent=1, keep=4, messages=[user("b"), assistant("x")]),
        first=opened(altered_answer="keep"),
    )
    assert _at(state, [*FIRST, assistant("one!"), user("c")]) == (1, [user("c")])


def test_examples_after_a_side_request_are_no_answers() -> None:
    """A first request that has nothing of the title request before it may bring examples of its own."""
    title = state_of(turn(messages=[{"role": "system", "content": "Title"}, user("2+2"), assistant("Sum")]))
    assert _at(title, DEMO) == (0, DEMO)
    # With the same beginning the message in the answer's place could be the answer.
    with pytest.raises(CannotExtend, match="which would be lost"):
        position(state_of(turn(messages=[SYSTEM, user("2+2"), assistant("4")])), DEMO)


def test_another_head_than_a_cut_turns_begins_a_new_root() -> None:
    """It does not continue the turn that was cut at its length."""
    state = state_of(turn(messages=WHOLE[:3], tools=[TOOL], finish="length"), first=opened(mode="tree"))
    at = find(state, SECOND, strict, Head([OTHER], {}))
    assert (at.parent, at.root) == (None, "head_changed")
    with pytest.raises(TurnTruncated):
        find(state, SECOND, strict, Head([TOOL], {}))
