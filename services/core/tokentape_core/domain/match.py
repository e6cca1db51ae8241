"""Matchers: is a message of a request the one that was recorded?

Agents re-send the whole conversation with every turn, and their clients re-serialise it. A matcher decides
which differences do not count; it is not asked about a turn whose messages are all equal. Only `role`,
`content`, `reasoning_content` and `tool_calls` are compared at all; `None`, `""`, `[]` and an absent key are
the same.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from tokentape_core.domain.canonical import (
    differing_key,
    equal,
    equal_json,
    same_call,
    same_calls,
    unique_keys,
)
from tokentape_core.texts import read_json

Message = Mapping[str, Any]
Matcher = Callable[[Message, Message], bool]

KEYS: Final = ("role", "content", "reasoning_content", "tool_calls")
"""What is compared of a message."""


def equivalent(stored: Message, incoming: Message) -> bool:
    """No contradiction: what clients leave out, or spell differently, when they re-serialise does not count.

    Text is compared as text, reasoning only if the incoming message has any, tool calls by number, name and
    JSON value; see `canonical`. Their ids may be others, if they are renamed consistently over the whole
    conversation, which `position` looks after.
    """
    return differing_key(stored, incoming) is None


def strict(stored: Message, incoming: Message) -> bool:
    """Equal to the letter, but for a tool call's `index`, which exists on the wire only."""
    return _same_text(stored, incoming) and same_calls(stored, incoming, _strict_call)


def loose_tool_call(stored: Message, incoming: Message) -> bool:
    """As `strict`, but `function.arguments` may be spelled differently if they are equal JSON objects."""
    return _same_text(stored, incoming) and same_calls(stored, incoming, _loose_call)


def role_content_only(stored: Message, incoming: Message) -> bool:
    """Equal role and content; tool calls and reasoning do not count."""
    return _same(stored, incoming, ("role", "content"))


MATCHERS: Final[Mapping[str, Matcher]] = {
    matcher.__name__: matcher for matcher in (equivalent, strict, loose_tool_call, role_content_only)
}


def contradicting_key(stored: Message, incoming: Message, matcher: Matcher) -> str | None:
    """The first of `KEYS` in which a message that the matcher refused differs; None if no single one does."""
    if matcher is equivalent:
        return differing_key(stored, incoming)
    return next((key for key in KEYS if not equal(stored.get(key), incoming.get(key))), None)


def is_text(messages: Iterable[Message]) -> bool:
    """Whether Python's `==` with these messages is JSON's: they hold no number and neither true nor false.

    To Python true is 1. The `index` of a tool call is not looked at, as it does not count.
    """
    pending: list[Any] = []
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
            message = {**message, "tool_calls": [{**call, "index": None} for call in calls]}
        pending.append(message)
    while pending:  # not a function that calls itself: an engine's answer may nest deeper than that can go
        value = pending.pop()
        if isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
        elif value is not None and not isinstance(value, str):
            return False
    return True


def _same_text(stored: Message, incoming: Message) -> bool:
    return _same(stored, incoming, ("role", "content", "reasoning_content"))


def _same(stored: Message, incoming: Message, keys: tuple[str, ...]) -> bool:
    # Every message of a conversation is compared at each of its turns, and nearly always is the same.
    for key in keys:
        ours, theirs = stored.get(key), incoming.get(key)
        if type(ours) is str and type(theirs) is str:
            if ours != theirs:
                return False
        elif ours is not theirs and not equal(ours, theirs):
            return False
    return True


def _strict_call(stored: Any, incoming: Any) -> bool:
    return _same_labels(stored, incoming) and same_call(stored, incoming, equal)


def _loose_call(stored: Any, incoming: Any) -> bool:
    return _same_labels(stored, incoming) and same_call(stored, incoming, _equal_arguments)


def _same_labels(stored: Any, incoming: Any) -> bool:
    """Of two calls, whether `id` and `type` are equal; what is no call has none."""
    are_calls = isinstance(stored, dict) and isinstance(incoming, dict)
    return not are_calls or _same(stored, incoming, ("id", "type"))


def _equal_arguments(a: Any, b: Any) -> bool:
    if equal(a, b):
        return True
    try:
        ours, theirs = _arguments(a), _arguments(b)
        return isinstance(ours, dict) and isinstance(theirs, dict) and equal_json(ours, theirs)
    except (ValueError, RecursionError):
        return False


def _arguments(value: Any) -> Any:
    return read_json(value, object_pairs_hook=unique_keys) if isinstance(value, str) else value
