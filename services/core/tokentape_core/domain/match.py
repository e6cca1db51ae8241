"""Matchers: is a message of a request the one that was recorded?

Agents re-send the whole conversation with every turn, and their clients re-serialise it. A matcher decides
which differences do not count; it is not asked about a turn whose messages are all equal. Only `role`,
`content`, `reasoning_content` and `tool_calls` are compared at all; `None`, `""`, `[]` and an absent key are
the same.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

Message = Mapping[str, Any]
Matcher = Callable[[Message, Message], bool]


def strict(stored: Message, incoming: Message) -> bool:
    """Equal to the letter, but for a tool call's `index`, which exists on the wire only."""
    return _same_text(stored, incoming) and _same_calls(stored, incoming, _equal)


def loose_tool_call(stored: Message, incoming: Message) -> bool:
    """As `strict`, but `function.arguments` may be spelled differently if they are equal JSON objects."""
    return _same_text(stored, incoming) and _same_calls(stored, incoming, _equal_arguments)


def role_content_only(stored: Message, incoming: Message) -> bool:
    """Equal role and content; tool calls and reasoning do not count."""
    return _same(stored, incoming, ("role", "content"))


MATCHERS: Final[Mapping[str, Matcher]] = {
    matcher.__name__: matcher for matcher in (strict, loose_tool_call, role_content_only)
}


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
        elif ours is not theirs and not _equal(ours, theirs):
            return False
    return True


def _same_calls(stored: Message, incoming: Message, same_arguments: Callable[[Any, Any], bool]) -> bool:
    ours, theirs = stored.get("tool_calls"), incoming.get("tool_calls")
    if ours is theirs:
        return True
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return _equal(ours, theirs)
    return len(ours) == len(theirs) and all(
        _same_call(a, b, same_arguments) for a, b in zip(ours, theirs, strict=True)
    )


def _same_call(stored: Any, incoming: Any, same_arguments: Callable[[Any, Any], bool]) -> bool:
    if not isinstance(stored, dict) or not isinstance(incoming, dict):
        return _equal(stored, incoming)
    if not _same(stored, incoming, ("id", "type")):
        return False
    ours, theirs = stored.get("function") or {}, incoming.get("function") or {}
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return _equal(ours, theirs)
    return _equal(ours.get("name"), theirs.get("name")) and same_arguments(
        ours.get("arguments"), theirs.get("arguments")
    )


def _equal(a: Any, b: Any) -> bool:
    """JSON equality in which every empty value is the same."""
    return (_is_empty(a) and _is_empty(b)) or _equal_json(a, b)


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [])


def _equal_json(a: Any, b: Any) -> bool:
    """Equality of JSON values: unlike Python's `==`, true is not 1; numbers compare by value."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal_json(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _equal_arguments(a: Any, b: Any) -> bool:
    if _equal(a, b):
        return True
    try:
        ours, theirs = _arguments(a), _arguments(b)
        return isinstance(ours, dict) and isinstance(theirs, dict) and _equal_json(ours, theirs)
    except (ValueError, RecursionError):
        return False


def _arguments(value: Any) -> Any:
    return json.loads(value, object_pairs_hook=_unique) if isinstance(value, str) else value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; with a key twice it has no single meaning, hence equals nothing."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("duplicate key")
    return keys
