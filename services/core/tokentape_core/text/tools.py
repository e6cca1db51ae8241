"""In which form the chat template gets the agent's tools.

SGLang does not render a tool as the agent sent it, but as its own request class writes it out again: with
other keys and, in older versions, in another order. A model that is served with SGLang's chat endpoint sees
that form, and one that is trained on other prompts sees it for the first time there. The forms are those of
`Tool` and `Function` in `sglang/srt/entrypoints/openai/protocol.py` of the versions whose names they have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from tokentape_core.text.errors import RenderError

__all__ = ["AS_SENT", "TOOLS_FORMS", "Tool", "tools_in_form"]

Tool = Mapping[str, object]

AS_SENT: Final = "as-sent"

_LEFT_OUT: Final = frozenset({"strict", "defer_loading"})
"""These are left out where they are null; other keys are written as null."""


def tools_in_form(form: str, tools: Sequence[Tool] | None) -> Sequence[Tool] | None:
    """The tools as the template gets them; None if there are none. The input is not changed.

    Some templates tell an empty list of tools from none; requests do not. Raises `RenderError` for a tool
    that cannot be written in this form.
    """
    if not tools:
        return None
    return [TOOLS_FORMS[form](tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _as_sent(tool: Tool, _: str) -> Tool:
    return tool


def _sglang_0_5_16(tool: Tool, where: str) -> Tool:
    keys = _keys(tool, where)
    if keys["strict"] is None:
        keys["strict"] = False
    return _wrapped(tool, keys)


def _sglang_0_5_23(tool: Tool, where: str) -> Tool:
    keys = _keys(tool, where)
    order = dict.fromkeys(key for key in _function(tool, where) if key in keys)
    return _wrapped(tool, {key: keys[key] for key in {**order, **keys}})


def _keys(tool: Tool, where: str) -> dict[str, object]:
    """All that SGLang's class keeps of a function, in its order."""
    function = _function(tool, where)
    keys = {
        key: function.get(key) for key in ("description", "name", "parameters", "strict", "defer_loading")
    }
    if keys["defer_loading"] is None:
        keys["defer_loading"] = tool.get("defer_loading")
    return keys


def _wrapped(tool: Tool, keys: Mapping[str, object]) -> Tool:
    written = {key: value for key, value in keys.items() if key not in _LEFT_OUT or value is not None}
    return {
        "type": tool.get("type", "function"),
        "function": written,
        "defer_loading": tool.get("defer_loading"),
    }


def _function(tool: Tool, where: str) -> Tool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RenderError(f"{where} has no function with a name")
    return function


TOOLS_FORMS: Final[Mapping[str, Callable[[Tool, str], Tool]]] = MappingProxyType(
    {AS_SENT: _as_sent, "sglang-0.5.16": _sglang_0_5_16, "sglang-0.5.23": _sglang_0_5_23}
)
"""By name, from a tool and what to call it in errors to what the template gets."""
