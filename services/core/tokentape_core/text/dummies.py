"""Stand-ins for a history: what they render to is cut away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tokentape_core.text.errors import RenderError
from tokentape_core.text.messages import ArgumentsForm, Message

__all__ = ["OPENING", "OTHER", "PROBES", "SENTINELS", "Probe", "dummy_assistant", "kind_of"]

SENTINELS: Final = tuple(f"tokentape-sentinel-{i}" for i in range(8))
"""One of these stands for the assistant's text: the first that no message contains."""

OTHER: Final = "tokentape-other"
"""A content that no message has."""

OPENING: Final[tuple[Message, ...]] = (
    {"role": "system", "content": "system"},
    {"role": "user", "content": "user"},
)

_CALL: Final = {"id": "call", "type": "function", "function": {"name": "name"}}
_CALLING: Final[Message] = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_ANSWER: Final[Message] = {"role": "assistant", "content": "assistant"}
_REASONED: Final[Message] = {**_ANSWER, "reasoning_content": "reasoning"}
_RESULT: Final[Message] = {"role": "tool", "content": "content", "tool_call_id": "call"}
_USER: Final[Message] = {"role": "user", "content": "content"}


@dataclass(frozen=True, slots=True)
class Probe:
    """What follows a turn, to be rendered without and with `earlier` before that turn."""

    turn: Message
    following: tuple[Message, ...]
    earlier: tuple[Message, ...]


def kind_of(message: Message, role: str) -> str:
    """The kind of message that `PROBES` tells apart."""
    return CALLING if role == "assistant" and message.get("tool_calls") else role


CALLING: Final = "assistant with tool calls"

PROBES: Final[Mapping[str, tuple[Probe, ...]]] = {
    "tool": tuple(
        Probe(_CALLING, (_RESULT, *after), (_CALLING, _RESULT, *after)) for after in ((), (_USER,))
    ),
    "user": (Probe(_ANSWER, (_USER,), (_ANSWER, _USER)),),
    "assistant": tuple(
        Probe(_ANSWER, following, (_ANSWER, *following, *earlier))
        for following in ((_REASONED,), (_ANSWER, _USER), (_USER, _ANSWER))
        for earlier in ((), (_USER,), (_USER, _CALLING, _RESULT, _REASONED, _USER))
    ),
    CALLING: tuple(
        Probe(_ANSWER, (*between, _CALLING), (_ANSWER, *between, _CALLING, _RESULT, *earlier))
        for between in ((), (_USER,))
        for earlier in ((), (_ANSWER, _USER))
    ),
}
"""By kind, conversations in which a message of that kind follows a turn, and may depend on those before."""


def dummy_assistant(assistant: Message, sentinel: str, arguments_form: ArgumentsForm) -> Message:
    """A message with the recorded tool calls, and the sentinel in what the template writes last of it.

    That is the text, or the last call's arguments. The recorded ones are in the parent's tokens, and no
    tool message refers to them. Without them the cost stays constant, and a conversation can go on after
    the model sampled broken JSON. Raises `RenderError` for a tool call that has no function.
    """
    recorded = assistant.get("tool_calls")
    if not isinstance(recorded, list | tuple) or not recorded:
        return {"role": "assistant", "content": sentinel}
    calls: list[Message] = []
    for i, call in enumerate(recorded):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RenderError("a tool call of the recorded turn has no function")
        arguments = {"text": sentinel} if i == len(recorded) - 1 else {}
        dummy = {
            "name": function.get("name"),
            "arguments": json.dumps(arguments) if arguments_form == "string" else arguments,
        }
        calls.append({"id": call.get("id"), "type": "function", "function": dummy})
    return {"role": "assistant", "content": "", "tool_calls": calls}
