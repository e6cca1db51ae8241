"""Matchers on random messages: what holds for any of them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentape_core.domain.match import MATCHERS, equivalent, loose_tool_call, role_content_only, strict

text = st.text('ab \u00e9/"\\', max_size=3)
scalars = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([0.0, 1.0, 0.5]) | text
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=5,
)
arguments = (
    values
    | st.dictionaries(text, values, max_size=2).map(json.dumps)
    | st.sampled_from(['{"a":1,"a":1}', "{", "[]", '{"a": 1e0}', '{"a":1}', '{"a":true}', '{"a":NaN}'])
)
functions = st.fixed_dictionaries({}, optional={"name": text, "arguments": arguments})
calls = st.fixed_dictionaries(
    {}, optional={"id": text, "type": text, "index": st.integers(0, 2), "function": functions | values}
)
messages = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant"]),
        "content": values,
        "reasoning_content": values,
        "tool_calls": st.lists(calls | values, max_size=2) | values,
        "name": text,
    },
)
each_matcher = pytest.mark.parametrize("matcher", MATCHERS.values(), ids=MATCHERS)


@each_matcher
@given(messages)
def test_a_message_equals_itself(matcher: Any, message: dict[str, Any]) -> None:
    """Every matcher is reflexive, also after the message went through JSON."""
    assert matcher(message, message) is True
    assert matcher(message, json.loads(json.dumps(message))) is True


@each_matcher
@given(messages, messages)
def test_order_does_not_matter(matcher: Any, one: dict[str, Any], two: dict[str, Any]) -> None:
    """Every matcher returns a bool and is symmetric, but for `equivalent`, to which an omission is none."""
    assert isinstance(matcher(one, two), bool)
    if matcher is not equivalent:
        assert matcher(one, two) is matcher(two, one)


@given(messages, messages)
def test_strict_is_the_strictest(one: dict[str, Any], two: dict[str, Any]) -> None:
    """What `strict` calls equal all others call equal as well, and what `loose_tool_call` does too."""
    if strict(one, two):
        assert loose_tool_call(one, two)
    if loose_tool_call(one, two):
        assert equivalent(one, two)
        assert role_content_only(one, two)


@each_matcher
@given(messages, st.sampled_from([None, "", []]), st.sampled_from([None, "", []]))
def test_empty_values_are_one(matcher: Any, message: dict[str, Any], one: Any, two: Any) -> None:
    """In any compared key, `None`, `""`, `[]` and absence are the same."""
    for key in ("role", "content", "reasoning_content", "tool_calls"):
        rest = {name: value for name, value in message.items() if name != key}
        assert matcher({**rest, key: one}, {**rest, key: two}) is True
        assert matcher({**rest, key: one}, rest) is True


@given(st.dictionaries(text, values, max_size=3), st.booleans(), st.booleans(), st.sampled_from([None, 2]))
def test_arguments_may_be_spelled_in_any_way(
    value: dict[str, Any], sort: bool, escape: bool, indent: int | None
) -> None:
    """Key order, escapes and spacing do not change the arguments under `loose_tool_call`."""
    spelled = [json.dumps(value), json.dumps(value, sort_keys=sort, ensure_ascii=escape, indent=indent)]
    stored, incoming = (
        {"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]} for arguments in spelled
    )
    assert loose_tool_call(stored, incoming) is True
    assert strict(stored, incoming) is (spelled[0] == spelled[1])
