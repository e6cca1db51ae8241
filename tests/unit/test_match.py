"""Matchers: which differences between a recorded message and a re-sent one do not count."""

from typing import Any

import pytest

from tests.support.sessions import state_of, turn
from tokentape_contracts.errors import AnswerAltered, CannotExtend
from tokentape_core.domain.match import (
    MATCHERS,
    equivalent,
    is_text,
    loose_tool_call,
    role_content_only,
    strict,
)
from tokentape_core.domain.position import Head, position


def _call(arguments: Any = '{"a":1}', name: str = "ls", **fields: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "function", "function": function, **fields}],
    }


def _tool(**custom: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "sh"} | custom}],
    }


NO_HEAD = Head(None, {})


def _is_repeated(event: Any, messages: list[dict[str, Any]], matcher: Any) -> bool:
    """Whether a session with this one turn goes on from it."""
    try:
        return position(state_of(event), messages, matcher, NO_HEAD).parent is not None
    except (AnswerAltered, CannotExtend):
        return False


A = {"role": "assistant", "content": "hi"}
EMPTY = {"role": "assistant"}

# stored, incoming, then whether strict, loose_tool_call and role_content_only call them equal
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool, bool, bool]] = {
    "itself": (A, dict(A), True, True, True),
    "role": (A, {**A, "role": "user"}, False, False, False),
    "content": (A, {**A, "content": "hi "}, False, False, False),
    "no role at all": ({}, {}, True, True, True),
    "content None and absent": ({**A, "content": None}, EMPTY, True, True, True),
    "content empty and None": ({**A, "content": ""}, {**A, "content": None}, True, True, True),
    "content [] and empty": ({**A, "content": []}, {**A, "content": ""}, True, True, True),
    "content {} is a value": ({**A, "content": {}}, EMPTY, False, False, False),
    "content 0 is a value": ({**A, "content": 0}, EMPTY, False, False, False),
    "content false is a value": ({**A, "content": False}, EMPTY, False, False, False),
    "content [None] is a value": ({**A, "content": [None]}, EMPTY, False, False, False),
    "content parts": (
        {**A, "content": [{"type": "text", "text": "x"}]},
        {**A, "content": [{"text": "x", "type": "text"}]},
        True,
        True,
        True,
    ),
    "content parts and text": (
        {**A, "content": [{"type": "text", "text": "hi"}]},
        A,
        False,
        False,
        False,
    ),
    "an additional key in a content part": (
        {**A, "content": [{"type": "text", "text": "x"}]},
        {**A, "content": [{"type": "text", "text": "x", "cache_control": {}}]},
        False,
        False,
        False,
    ),
    "unicode forms": ({**A, "content": "é"}, {**A, "content": "e\u0301"}, False, False, False),
    "reasoning": ({**A, "reasoning_content": "x"}, {**A, "reasoning_content": "y"}, False, False, True),
    "reasoning left out": ({**A, "reasoning_content": "x"}, A, False, False, True),
    "reasoning empty": ({**A, "reasoning_content": ""}, A, True, True, True),
    "other keys": (
        {**A, "refusal": None, "audio": 1},
        {**A, "name": "bob", "annotations": []},
        True,
        True,
        True,
    ),
    "calls None, [] and empty": ({**A, "tool_calls": None}, {**A, "tool_calls": []}, True, True, True),
    "calls empty text": ({**A, "tool_calls": ""}, A, True, True, True),
    "calls 0": ({**A, "tool_calls": 0}, A, False, False, True),
    "calls {}": ({**A, "tool_calls": {}}, A, False, False, True),
    "calls left out": (_call(), EMPTY, False, False, True),
    "calls an object": ({**A, "tool_calls": {"a": 1}}, {**A, "tool_calls": {"a": 1}}, True, True, True),
    "a call more": (
        _call(),
        {**EMPTY, "tool_calls": _call()["tool_calls"] * 2},
        False,
        False,
        True,
    ),
    "a call that is text": ({**A, "tool_calls": ["x"]}, {**A, "tool_calls": ["x"]}, True, True, True),
    "a call that is text or an object": ({**EMPTY, "tool_calls": ["x"]}, _call(), False, False, True),
    "a call's index": (_call(index=0), _call(), True, True, True),
    "a call's index differs": (_call(index=0), _call(index=1), True, True, True),
    "a call's other keys": (_call(extra=1), _call(custom="x"), True, True, True),
    "a call's id": (_call(id="c2"), _call(), False, False, True),
    "a call's type": (_call(type="custom"), _call(), False, False, True),
    "a call without function": (_call(function=None), _call(function={}), True, True, True),
    "a call of another type": (_tool(input="ls"), _tool(input="rm"), False, False, True),
    "empty calls": ({**A, "tool_calls": [None]}, {**A, "tool_calls": [[]]}, True, True, True),
    "a function that is text": (_call(function="x"), _call(function="x"), True, True, True),
    "a function that is text or an object": (_call(function="x"), _call(), False, False, True),
    "function name": (_call(name="rm"), _call(), False, False, True),
    "arguments None and empty": (_call(None), _call(""), True, True, True),
    "arguments empty and {}": (_call(""), _call("{}"), False, False, True),
    "spacing": (_call('{"a":1}'), _call('{ "a" : 1 }\n'), False, True, True),
    "key order": (_call('{"a":1,"b":2}'), _call('{"b":2,"a":1}'), False, True, True),
    "key order inside": (_call('{"o":{"a":1,"b":2}}'), _call('{"o":{"b":2,"a":1}}'), False, True, True),
    "list order": (_call('{"a":[1,2]}'), _call('{"a":[2,1]}'), False, False, True),
    "number spellings": (_call('{"a":1e3}'), _call('{"a":1000.0}'), False, True, True),
    "integer and float": (_call('{"a":1000}'), _call('{"a":1000.0}'), False, True, True),
    "big integers": (_call('{"a":9007199254740993}'), _call('{"a": 9007199254740992}'), False, False, True),
    "big integer and float": (
        _call('{"a":9007199254740993}'),
        _call('{"a":9007199254740992.0}'),
        False,
        False,
        True,
    ),
    "an escaped slash": (_call(r'{"a":"\/"}'), _call('{"a":"/"}'), False, True, True),
    "escaped letters": (_call(r'{"a":"\u00e9"}'), _call('{"a":"é"}'), False, True, True),
    "true and 1": (_call('{"a":true}'), _call('{"a":1}'), False, False, True),
    "false and 0": (_call('{"a":false}'), _call('{"a":0.0}'), False, False, True),
    "true and 'true'": (_call('{"a":true}'), _call('{"a":"true"}'), False, False, True),
    "null and absent": (_call('{"a":null}'), _call("{}"), False, False, True),
    "null and empty": (_call('{"a":null}'), _call('{"a":""}'), False, False, True),
    "an additional key": (_call('{"a":1}'), _call('{"a":1,"b":2}'), False, False, True),
    "a key twice": (_call('{"a":1,"a":1}'), _call('{"a":1}'), False, False, True),
    "a key twice inside": (_call('{"o":[{"a":1,"a":2}]}'), _call('{"o":[{"a":2}]}'), False, False, True),
    "a key twice on both sides": (_call('{"a":1,"a":2}'), _call('{"a":1, "a":2}'), False, False, True),
    "a key twice, the same text": (_call('{"a":1,"a":2}'), _call('{"a":1,"a":2}'), True, True, True),
    "invalid JSON": (_call('{"a":1'), _call('{"a": 1'), False, False, True),
    "invalid JSON, the same text": (_call('{"a":1'), _call('{"a":1'), True, True, True),
    "invalid and valid JSON": (_call('{"a":1'), _call('{"a":1}'), False, False, True),
    "an integer of 5000 digits": (_call('{"a":%s}' % ("9" * 5000)), _call('{"a":1}'), False, False, True),
    "nested too deeply to compare": (
        _call('{"a":' + "[" * 5000 + "]" * 5000 + "}"),
        _call('{"a": ' + "[" * 5000 + "]" * 5000 + "}"),
        False,
        False,
        True,
    ),
    "nested 900 levels": (
        _call('{"a":' + "[" * 900 + "]" * 900 + "}"),
        _call('{"a": ' + "[" * 900 + "]" * 900 + "}"),
        False,
        False,
        True,
    ),
    "lists": (_call("[1]"), _call("[ 1 ]"), False, False, True),
    "list and object": (_call("[]"), _call("{}"), False, False, True),
    "scalars": (_call("1"), _call("1.0"), False, False, True),
    "objects, not text": (_call({"a": 1, "b": 2}), _call({"b": 2, "a": 1}), True, True, True),
    "objects with true and 1": (_call({"a": True}), _call({"a": 1}), False, False, True),
    "an object and its text": (_call({"a": 1}), _call('{"a": 1}'), False, True, True),
    "an object and another's text": (_call({"a": 1}), _call('{"a": 2}'), False, False, True),
    "NaN": (_call('{"a":NaN}'), _call('{"a": NaN}'), False, False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_a_matcher_decides(case: str) -> None:
    """Each matcher's verdict on one kind of difference, in both directions, always a bool."""
    stored, incoming, *expected = CASES[case]
    for matcher, equal in zip((strict, loose_tool_call, role_content_only), expected, strict=True):
        assert matcher(stored, incoming) is equal, matcher.__name__
        assert matcher(incoming, stored) is equal, matcher.__name__
        assert matcher(stored, stored) is True, matcher.__name__


@pytest.mark.parametrize("case", CASES)
def test_a_turn_is_repeated_as_its_matcher_says(case: str) -> None:
    """A matcher is not asked about a turn whose messages are equal; it would have said the same."""
    stored, incoming, *expected = CASES[case]
    for matcher, equal in zip((strict, loose_tool_call, role_content_only), expected, strict=True):
        for ours, theirs, same in (
            (stored, incoming, equal),
            (incoming, stored, equal),
            (stored, stored, True),
        ):
            assert _is_repeated(turn(messages=[ours]), [theirs], matcher) is same, matcher.__name__


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (A, True),
        ({**A, "reasoning_content": None, "tool_calls": []}, True),
        ({**A, "content": [{"type": "text", "text": "x"}]}, True),
        (_call(index=0), True),
        (_call(function={"name": "ls", "index": 0}), False),
        (_call(strict=True), False),
        ({**A, "index": 0}, False),
        ({**A, "content": [{"type": "text", "text": "x", "index": 1}]}, False),
        ({**A, "tool_calls": [0]}, False),
    ],
)
def test_messages_of_text_only(message: dict[str, Any], expected: bool) -> None:
    """Wherever a number or a boolean counts, Python's equality is not JSON's."""
    assert is_text([A, message]) is expected


def test_messages_that_nest_deeply_are_judged() -> None:
    """An engine's answer may nest deeper than Python can call; it is recorded all the same."""
    content: list[Any] = []
    for _ in range(5000):
        content = [content]
    assert is_text([{"role": "assistant", "content": content}])


def test_a_matcher_is_asked_only_about_differences() -> None:
    """One of the user's own is not called for every message of every turn."""
    asked = []

    def matcher(stored: Any, incoming: Any) -> bool:
        asked.append((stored, incoming))
        return True

    state = state_of(turn(messages=[A]), turn(parent=1, messages=[_call(index=0)]))
    changed = {**_call(index=0), "content": "other"}
    assert position(state, [A, _call(index=0)], matcher, NO_HEAD).parent is state.head
    assert asked == []
    assert position(state, [A, changed], matcher, NO_HEAD).parent is state.head
    assert asked == [(_call(index=0), changed)]


def test_matchers_are_known_by_name() -> None:
    """The names that a session can be opened with are the functions' own."""
    assert dict(MATCHERS) == {f.__name__: f for f in (equivalent, strict, loose_tool_call, role_content_only)}
