"""Stand-ins for a history: what they render to is cut away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from tokentape_core.text.errors import RenderError
from tokentape_core.text.messages import ArgumentsForm, Message

__all__ = ["OPENING", "SENTINELS", "TURNS", "dummy_assistant"]

SENTINELS: Final = tuple(f"tokentape-sentinel-{i}" for i in range(8))
"""One of these stands for the assistant's text: the first that no message contains."""

OPENING: Final[tuple[Message, ...]] = (
    {"role": "system", "content": "system"},
    {"role": "user", "content": "user"},
)

_CALL: Final = {"id": "call", "type": "function", "function": {"name": "name"}}

TURNS: Final[Mapping[str, Message]] = {
    "tool": {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    "user": {"role": "assistant", "content": "assistant"},
}
"""By role, a turn that a message with that role answers."""


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
