"""From the text that the model wrote to an assistant message: reasoning, content and tool calls."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def parse_message(text: str, *, tools: bool) -> dict[str, Any]:
    """The assistant message that `text` (without its stop token) spells.

    - `reasoning_content`: what is inside a leading `<think>…</think>`; None without one. A block that was
      never closed is all reasoning.
    - `tool_calls`: one per well-formed `<tool_call>` block, with `arguments` as a JSON string; None without
      any. Only looked for when `tools` is true, that is when the request offered tools.
    - `content`: the rest, never None. Malformed blocks stay in it as they were written.
    """
    reasoning, rest = _split_reasoning(text)
    calls: list[dict[str, Any]] = []

    def take(block: re.Match[str]) -> str:
        function = _function(block[1])
        if function is None:
            return block[0]
        call_id = f"call_{uuid.uuid4().hex[:24]}"
        calls.append({"id": call_id, "index": len(calls), "type": "function", "function": function})
        return ""

    content = _TOOL_CALL.sub(take, rest) if tools else rest
    # Only with calls: otherwise white space around the answer is the model's own.
    content = content.strip() if calls else content
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": reasoning,
        "tool_calls": calls or None,
    }


def _split_reasoning(text: str) -> tuple[str | None, str]:
    opening, thought = text.partition("<think>")[::2]
    if "<think>" not in text or opening.strip():
        return None, text
    reasoning, _, rest = thought.partition("</think>")
    return reasoning.strip("\n"), rest.lstrip("\n")


def _function(block: str) -> dict[str, str] | None:
    """Name and arguments of a call, or None if `block` is not `{"name": str, "arguments": object}`."""
    try:
        call = json.loads(block)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return {"name": call["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
