"""What a message says, however it is spelled: the rule behind the matcher `equivalent`.

What clients were seen to change when they send an answer back, none of which says anything else:

- `reasoning_content` is left out, or stands under `reasoning`, or in a content part of type `thinking`;
- content is a list of text parts instead of a string, or the reverse; outer white space is gone; a part has a
  mark like `cache_control` or lost it; beside tool calls there is no content;
- a tool call has no `type`, or its arguments are an object, or other JSON text of the same value, or nothing
  for `{}`;
- keys like `refusal`, `annotations`, `audio`, `name` or `index` are added;
- the roles `developer` and `function` stand for `system` and `tool`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from tokentape_contracts.http import PRESENT_ROLES
from tokentape_core.texts import read_json

_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
MARKS: Final = frozenset({"cache_control"})
"""Keys of a content part, or of a tool, that say how to serve it, not what it says."""
_UNSAID: Final = frozenset({"id", "index"})
"""Keys of a tool call that do not say what it calls."""


def differing_key(stored: Mapping[str, Any], incoming: Mapping[str, Any]) -> str | None:
    """The key in which the incoming message contradicts the stored one, or None if in none.

    Tool-call ids do not count here: whether they are renamed consistently only the conversation shows.
    """
    if stored.get("role") != incoming.get("role") and role_of(stored) != role_of(incoming):
        return "role"
    ours, theirs = stored.get("content"), incoming.get("content")
    our_thoughts, their_thoughts = _reasoning(stored), _reasoning(incoming)
    if type(ours) is not str or type(theirs) is not str or ours != theirs:
        (ours, thought), (theirs, echoed) = _read_content(ours), _read_content(theirs)
        our_thoughts, their_thoughts = our_thoughts or thought, their_thoughts or echoed
        is_left_out = theirs == "" and bool(incoming.get("tool_calls")) and bool(stored.get("tool_calls"))
        if not is_left_out and not equal_json(ours, theirs):
            return "content"
    if their_thoughts and not equal_json(our_thoughts, their_thoughts):
        return "reasoning_content"
    if not same_calls(stored, incoming, _equivalent_call):
        return "tool_calls"
    return None


def role_of(message: Mapping[str, Any]) -> Any:
    """The message's role under its present name; None for none."""
    role = message.get("role")
    return PRESENT_ROLES.get(role, role) if isinstance(role, str) and role else role or None


def equal_json(a: Any, b: Any) -> bool:
    """Equality of JSON values: unlike Python's `==`, true is not 1; numbers compare by value."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_json(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(equal_json(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def equal(a: Any, b: Any) -> bool:
    """Equality of JSON values to which every empty value is the same."""
    return (_is_empty(a) and _is_empty(b)) or equal_json(a, b)


def same_calls(
    stored: Mapping[str, Any], incoming: Mapping[str, Any], same: Callable[[Any, Any], bool]
) -> bool:
    """Whether two messages have as many tool calls, each the `same` as the other's."""
    ours, theirs = stored.get("tool_calls"), incoming.get("tool_calls")
    if ours is theirs:
        return True
    if not isinstance(ours, list) or not isinstance(theirs, list):
        return equal(ours, theirs)
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def same_call(stored: Any, incoming: Any, same_arguments: Callable[[Any, Any], bool]) -> bool:
    """Whether two tool calls call the same; their `id` and `index` do not count.

    Of a call of another type than a function all keys that have a value must be equal.
    """
    if not isinstance(stored, dict) or not isinstance(incoming, dict):
        return equal(stored, incoming)
    ours, theirs = stored.get("function"), incoming.get("function")
    if not isinstance(ours, dict) or not isinstance(theirs, dict) or not (ours or theirs):
        return equal_json(_said(stored), _said(incoming))
    return equal(ours.get("name"), theirs.get("name")) and same_arguments(
        ours.get("arguments"), theirs.get("arguments")
    )


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, for `json.loads`; with a key twice it has no single meaning, hence equals nothing."""
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("duplicate key")
    return keys


def _is_empty(value: Any) -> bool:
    return value is None or value in ("", [])


def _reasoning(message: Mapping[str, Any]) -> Any:
    value = message.get("reasoning_content") or message.get("reasoning")
    return value.strip() if isinstance(value, str) else value


def _read_content(content: Any) -> tuple[Any, str]:
    """The content, text as one string, and the reasoning that stands in its parts."""
    if content is None or isinstance(content, str):
        return (content or "").strip(), ""
    if not isinstance(content, list):
        return content, ""
    texts: list[str] = []
    others: list[Any] = []
    thoughts: list[str] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(kind, str) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "thinking" and isinstance(thought := part.get("thinking", part.get("text")), str):
            thoughts.append(thought)
        elif kind != "redacted_thinking":
            # Where it stands in the text is a part of what it says.
            before = "".join(texts)
            others += [before if others else before.lstrip(), _without_marks(part)]
            texts.clear()
    text = "".join(texts)
    return ([*others, text.rstrip()] if others else text.strip()), "".join(thoughts).strip()


def _without_marks(part: Any) -> Any:
    return {k: v for k, v in part.items() if k not in MARKS} if isinstance(part, dict) else part


def _equivalent_call(stored: Any, incoming: Any) -> bool:
    return same_call(stored, incoming, _same_arguments)


def _said(call: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in call.items() if value and key not in _UNSAID}


def _same_arguments(a: Any, b: Any) -> bool:
    if equal(a, b):
        return True
    try:
        return equal_json(_arguments(a), _arguments(b))
    except (ValueError, RecursionError):  # text that is no JSON, or has a key twice, equals itself alone
        return False


def _arguments(value: Any) -> Any:
    """The value of a call's arguments; none at all are an empty object."""
    if value is None:
        return {}
    if not isinstance(value, str):
        return value
    return read_json(value, object_pairs_hook=unique_keys) if value.strip() else {}
