"""From the messages of an OpenAI-style request to those that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from tokentape_contracts.http import PRESENT_ROLES
from tokentape_core.text.errors import RenderError
from tokentape_core.texts import read_json

__all__ = ["ArgumentsForm", "Message", "template_messages", "template_role"]

Message = Mapping[str, object]

ArgumentsForm = Literal["object", "string", "as_is"]
"""`function.arguments` decoded, as JSON text, or however the caller sent it."""

_PROMPT_ROLES = frozenset({"system", "user", "assistant", "tool"})


def template_messages(
    messages: Sequence[Message],
    *,
    arguments: ArgumentsForm,
    extra_roles: frozenset[str] = frozenset(),
    knows_developer: bool = False,
) -> list[dict[str, object]]:
    """Copies of `messages` in the one spelling that all templates take. The input is not changed.

    `content` becomes a string: text parts are joined; null and a missing key are the empty string. What an
    assistant thought is in `reasoning_content`, whether it came there, as `reasoning` or as parts of the
    content. Empty `tool_calls` are left out, the others get their `function.arguments` in the wanted form.
    Other keys stay. Roles are those of `template_role`; beyond system, user, assistant, tool and
    `extra_roles` they are refused: templates skip them silently. Raises `RenderError`, which names the
    message.
    """
    roles = _PROMPT_ROLES | extra_roles | ({"developer"} if knows_developer else set())
    return [
        _convert(message, f"messages[{i}]", arguments, roles, knows_developer)
        for i, message in enumerate(messages)
    ]


def template_role(role: object, *, knows_developer: bool) -> object:
    """The role under which a template takes a message with this one.

    `developer` is OpenAI's newer name of `system`, which few templates know; `function` its older name of
    `tool`.
    """
    if not isinstance(role, str) or (role == "developer" and knows_developer):
        return role
    return PRESENT_ROLES.get(role, role)


def _convert(
    message: Message, where: str, arguments: ArgumentsForm, roles: frozenset[str], knows_developer: bool
) -> dict[str, object]:
    if not isinstance(message, Mapping):
        raise RenderError(f"{where} is not an object")
    role = template_role(message.get("role"), knows_developer=knows_developer)
    if not isinstance(role, str) or role not in roles:
        raise RenderError(f"{where}.role is {role!r}; this model takes {', '.join(sorted(roles))}")
    # A collect converts every message of a session, nearly all of them plain text.
    converted = {**message, "role": role}
    if role == "assistant" and ("reasoning" in message or not isinstance(message.get("content"), str)):
        converted = _with_reasoning(converted, f"{where}.content")
    content = converted.get("content")
    if not isinstance(content, str):
        converted["content"] = _text(content, f"{where}.content")
    if "tool_calls" in converted and (calls := converted.pop("tool_calls")):
        converted["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls", arguments)
    return converted


def _with_reasoning(message: dict[str, object], where: str) -> dict[str, object]:
    """An assistant's message with its reasoning, if it has any, in `reasoning_content` alone."""
    content = message.get("content")
    parts = content if isinstance(content, list | tuple) else ()
    thoughts = [_thought(part, f"{where}[{i}]") for i, part in enumerate(parts)]
    if any(thought is not None for thought in thoughts):
        rest = [part for part, thought in zip(parts, thoughts, strict=True) if thought is None]
        message = {**message, "content": rest}
    reasoning = message.get("reasoning")
    found = reasoning if isinstance(reasoning, str) and reasoning else "".join(filter(None, thoughts))
    if found and not message.get("reasoning_content"):
        message = {**message, "reasoning_content": found}
    return message


def _thought(part: object, where: str) -> str | None:
    """The text of a part that is reasoning and not content; None for another part."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or kind not in ("thinking", "redacted_thinking"):
        return None
    if kind == "redacted_thinking":
        return ""  # nobody but its author can read it
    text = part.get("thinking", part.get("text"))
    if not isinstance(text, str):
        raise RenderError(f"{where} has no text of what was thought")
    return text


def _text(content: object, where: str) -> str:
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        raise RenderError(f"{where} is neither a string nor a list of parts")
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
    if not isinstance(text, str):
        raise RenderError(f"{where} is not a text part but {kind!r}: only text can be rendered")
    return text


def _tool_calls(calls: object, where: str, arguments: ArgumentsForm) -> list[dict[str, object]]:
    if not isinstance(calls, list | tuple):
        raise RenderError(f"{where} is not a list")
    return [_tool_call(call, f"{where}[{i}]", arguments) for i, call in enumerate(calls)]


def _tool_call(call: object, where: str, arguments: ArgumentsForm) -> dict[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise RenderError(f"{where} has no function")
    name = function.get("name")
    if not isinstance(name, str):
        raise RenderError(f"{where}.function has no name")
    value = _arguments(function.get("arguments"), f"{where}.function.arguments (of {name})", arguments)
    return {**call, "function": {**function, "arguments": value}}


def _arguments(value: object, where: str, form: ArgumentsForm) -> object:
    if form == "as_is" or (form == "string" and isinstance(value, str)):
        return value
    if form == "string":
        return json.dumps({} if value is None else value, ensure_ascii=False)
    if value is None or value == "":
        return {}  # a call without arguments, as some clients spell it
    if isinstance(value, str):
        try:
            value = read_json(value)
        except (ValueError, RecursionError) as error:
            raise RenderError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, Mapping):
        raise RenderError(f"{where} is not a JSON object")
    return value
