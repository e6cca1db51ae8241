"""What an echo may change of a message, and what it may not: the rule of the matcher `equivalent`."""

from typing import Any

import pytest

from tokentape_core.domain.canonical import differing_key
from tokentape_core.domain.match import contradicting_key, equivalent, role_content_only, strict

A = {"role": "assistant", "content": "hi"}
THOUGHT = {**A, "reasoning_content": "so"}


def calling(arguments: Any = '{"a": 1, "b": true}', name: str = "ls", **fields: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [{**call, **fields}]}


def text(*texts: str, **marks: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": piece, **marks} for piece in texts]


IMAGE = {"type": "image_url", "image_url": {"url": "data:x"}}

SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reasoning left out": (THOUGHT, A),
    "reasoning emptied": (THOUGHT, {**A, "reasoning_content": ""}),
    "reasoning under the other key": (THOUGHT, {**A, "reasoning": "so"}),
    "reasoning recorded under the other key": ({**A, "reasoning": "so"}, THOUGHT),
    "reasoning with other outer space": ({**A, "reasoning_content": "so\n"}, THOUGHT),
    "reasoning as a part": (
        THOUGHT,
        {**A, "content": [{"type": "thinking", "thinking": "so", "signature": ""}, *text("hi")]},
    ),
    "reasoning as two parts": (
        {**A, "reasoning_content": "so it is"},
        {**A, "content": [{"type": "thinking", "thinking": t} for t in ("so ", "it is")] + text("hi")},
    ),
    "redacted reasoning": (
        THOUGHT,
        {**A, "content": [{"type": "redacted_thinking", "data": "x"}, *text("hi")]},
    ),
    "one part for text": (A, {**A, "content": text("hi")}),
    "two parts for text": (A, {**A, "content": text("h", "i")}),
    "text for parts": ({**A, "content": text("h", "i")}, A),
    "parts of other protocols": (A, {**A, "content": [{"type": "output_text", "text": "hi"}]}),
    "bare strings as parts": (A, {**A, "content": ["h", "i"]}),
    "a mark is gone": ({**A, "content": text("hi", cache_control={"type": "ephemeral"})}, A),
    "a mark has come": (
        {"role": "user", "content": [IMAGE, *text("hi")]},
        {"role": "user", "content": [{**IMAGE, "cache_control": {}}, *text("hi")]},
    ),
    "outer space": ({**A, "content": "\n hi\n\n"}, A),
    "outer space about an image": (
        {"role": "user", "content": [*text("see "), IMAGE, *text(" there\n")]},
        {"role": "user", "content": [*text("see "), IMAGE, *text(" there")]},
    ),
    "no type": (
        calling(),
        {**calling(), "tool_calls": [{"function": calling()["tool_calls"][0]["function"]}]},
    ),
    "arguments spelled differently": (calling('{"a": 1e3, "b": "\\/"}'), calling('{"b":"/","a":1000.0}')),
    "arguments as an object": (calling(), calling({"b": True, "a": 1})),
    "arguments recorded as an object": (calling({"a": 1, "b": True}), calling()),
    "no arguments: null": (calling("{}"), calling(None)),
    "no arguments: empty": (calling("{}"), calling(" ")),
    "no arguments at all": (
        calling(""),
        {**A, "content": None, "tool_calls": [{"id": "c1", "function": {"name": "ls"}}]},
    ),
    "arguments that are no JSON": (calling("{oops"), calling("{oops")),
    "arguments with a key twice": (calling('{"a":1,"a":1}'), calling('{"a":1,"a":1}')),
    "another id": (calling(), calling(id="x")),
    "an index": (calling(), calling(index=0)),
    "no content beside a call": (calling(), {k: v for k, v in calling().items() if k != "content"}),
    "the text beside a call left out": (
        {**calling(), "content": "Let me see."},
        {**calling(), "content": None},
    ),
    "keys of an SDK": (
        A,
        {**A, "refusal": None, "annotations": [], "audio": None, "function_call": None, "name": "bot"},
    ),
    "what was parsed": (A, {**A, "parsed": {"x": 1}}),
    "no calls: empty": (A, {**A, "tool_calls": []}),
    "developer": ({"role": "system", "content": "x"}, {"role": "developer", "content": "x"}),
    "function": ({"role": "tool", "content": "x"}, {"role": "function", "name": "f", "content": "x"}),
}

OTHER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "role": (A, {**A, "role": "user"}, "role"),
    "content": (A, {**A, "content": "ho"}, "content"),
    "content left out": (A, {"role": "assistant"}, "content"),
    "content has come beside a call": (calling(), {**calling(), "content": "calling"}, "content"),
    "inner space": ({**A, "content": "a b"}, {**A, "content": "a  b"}, "content"),
    "case": (A, {**A, "content": "Hi"}, "content"),
    "an image is gone": (
        {"role": "user", "content": [IMAGE, *text("hi")]},
        {"role": "user", "content": "hi"},
        "content",
    ),
    "an image elsewhere in the text": (
        {"role": "user", "content": [*text("a"), IMAGE, *text("b")]},
        {"role": "user", "content": [*text("ab"), IMAGE]},
        "content",
    ),
    "reasoning": (THOUGHT, {**A, "reasoning_content": "no"}, "reasoning_content"),
    "reasoning has come": (A, THOUGHT, "reasoning_content"),
    "reasoning as another part": (
        THOUGHT,
        {**A, "content": [{"type": "thinking", "thinking": "no"}, *text("hi")]},
        "reasoning_content",
    ),
    "calls written as text": (calling(), {**A, "content": "[ls]"}, "content"),
    "calls dropped": (calling(), {"role": "assistant", "content": ""}, "tool_calls"),
    "a call has come": ({"role": "assistant", "content": ""}, calling(), "tool_calls"),
    "one call more": (calling(), {**calling(), "tool_calls": calling()["tool_calls"] * 2}, "tool_calls"),
    "another name": (calling(), calling(name="cat"), "tool_calls"),
    "another value": (calling(), calling('{"a": 2, "b": true}'), "tool_calls"),
    "true is not 1": (calling(), calling('{"a": 1, "b": 1}'), "tool_calls"),
    "null is not left out": (calling('{"a": null}'), calling("{}"), "tool_calls"),
    "a number is no text": (calling('{"a": 1}'), calling('{"a": "1"}'), "tool_calls"),
    "a key twice": (calling('{"a":1,"a":1}'), calling('{"a":1}'), "tool_calls"),
    "other text that is no JSON": (calling("{oops"), calling("{oops "), "tool_calls"),
    "a call of another kind": (
        calling(),
        {**calling(), "tool_calls": [{"type": "custom", "custom": {"name": "ls", "input": ""}}]},
        "tool_calls",
    ),
    "calls that are no list": (calling(), {**calling(), "tool_calls": {"a": 1}}, "tool_calls"),
}


@pytest.mark.parametrize("case", SAME)
def test_an_omission_or_another_spelling_is_the_same_message(case: str) -> None:
    """What clients were seen to do to an answer is no contradiction."""
    stored, incoming = SAME[case]
    assert differing_key(stored, incoming) is None
    assert equivalent(stored, incoming) is True


@pytest.mark.parametrize("case", OTHER)
def test_a_contradiction_is_another_message(case: str) -> None:
    """The key that contradicts is named."""
    stored, incoming, key = OTHER[case]
    assert differing_key(stored, incoming) == key
    assert equivalent(stored, incoming) is False


def test_other_matchers_name_the_first_key_that_differs() -> None:
    """What counts as a difference is theirs; where no single key differs there is none to name."""
    assert contradicting_key(THOUGHT, A, equivalent) is None
    assert contradicting_key(THOUGHT, A, strict) == "reasoning_content"
    assert contradicting_key(A, {**A, "content": "hi "}, role_content_only) == "content"
    assert contradicting_key(A, A, lambda *_: False) is None


@pytest.mark.parametrize("kind", [[], {}, 1, None, True])
def test_a_part_of_a_strange_type_is_compared_as_it_is(kind: Any) -> None:
    """Whatever a client calls the type of a part, it is equal to itself and to nothing else."""
    part = {"role": "user", "content": [{"type": kind, "text": "x"}]}
    assert differing_key(part, dict(part)) is None
    assert differing_key(part, {"role": "user", "content": "x"}) == "content"


def test_deep_arguments_are_compared() -> None:
    """Arguments nested as deeply as a body may are equal to themselves; deeper ones are at least no error."""
    deep = "[" * 90 + "]" * 90
    assert differing_key(calling(deep), calling(f" {deep}")) is None
    beyond = "[" * 50_000 + "]" * 50_000
    assert differing_key(calling(beyond), calling(beyond)) is None
    assert differing_key(calling(beyond), calling(f" {beyond}")) == "tool_calls"
