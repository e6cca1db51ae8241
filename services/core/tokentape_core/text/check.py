"""Is a chat template append-only? Every kind of boundary is tried with a small dialogue.

A dialogue is recorded as the service would record it, with what a model that follows the template would
sample, and then compared with the template's rendering of the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from tokentape_core.text.errors import NotAppendable, RenderError
from tokentape_core.text.render import ChatRenderer
from tokentape_core.texts import common_start

__all__ = ["BoundaryCheck", "Outcome", "check_boundaries", "is_append_only"]

_Ids = npt.NDArray[np.int32]
_Message = Mapping[str, Any]

_EXCERPT_CHARS = 40


class Outcome(StrEnum):
    """What becomes of a turn at a boundary."""

    OK = "ok"
    """It extends the recording, and the text is that of rendering the whole conversation."""
    DIFFERS = "differs"
    """It extends the recording, which keeps tokens that the template would now write otherwise."""
    REFUSED = "refused"
    """The template can write it, but not after recorded tokens."""
    UNSUPPORTED = "unsupported"
    """The template, or the family, does not take such a message at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryCheck:
    """One boundary and what was found there."""

    name: str
    outcome: Outcome
    reason: str = ""
    """Why it is refused or not supported; one sentence."""
    position: int | None = None
    """The index of the first recorded token whose text differs."""
    template: str = ""
    """The template's text from there on, some characters of it."""
    recorded: str = ""
    """The recorded text from there on, some characters of it."""


@dataclass(frozen=True, slots=True)
class _Turn:
    assistant: _Message
    following: tuple[_Message, ...]


@dataclass(frozen=True, slots=True)
class _Dialogue:
    name: str
    turns: tuple[_Turn, ...]
    tools: bool = False


def check_boundaries(
    renderer: ChatRenderer, *, template_kwargs: Mapping[str, object] | None = None
) -> list[BoundaryCheck]:
    """One entry for each kind of boundary, in a fixed order. Takes milliseconds; raises nothing of its own.

    `template_kwargs` win over those of the renderer.
    """
    return [_check(renderer, dialogue, template_kwargs) for dialogue in _DIALOGUES]


def is_append_only(checks: Sequence[BoundaryCheck]) -> bool:
    """Whether each boundary that template and family take at all has the template's own ids.

    Tool messages and user messages must be among those: a template without them is not called append-only.
    """
    taken = [check for check in checks if check.outcome is not Outcome.UNSUPPORTED]
    needed = {_USER.name, _TOOL.name} <= {check.name for check in taken}
    return needed and all(check.outcome is Outcome.OK for check in taken)


def _check(
    renderer: ChatRenderer, dialogue: _Dialogue, template_kwargs: Mapping[str, object] | None
) -> BoundaryCheck:
    messages = [_OPENING, *(m for turn in dialogue.turns for m in (turn.assistant, *turn.following))]
    role = dialogue.turns[-1].following[0]["role"]
    if role not in renderer.append_roles:
        reason = f"messages with role {role!r} are not appended in this family"
        return BoundaryCheck(name=dialogue.name, outcome=Outcome.UNSUPPORTED, reason=reason)
    tools = _TOOLS if dialogue.tools else None
    try:
        whole = renderer.render(messages, tools=tools, template_kwargs=template_kwargs)
    except RenderError as error:
        return BoundaryCheck(name=dialogue.name, outcome=Outcome.UNSUPPORTED, reason=str(error))
    try:
        recorded = _record(renderer, dialogue, tools, template_kwargs)
    except (NotAppendable, RenderError) as error:
        return BoundaryCheck(name=dialogue.name, outcome=Outcome.REFUSED, reason=str(error))
    return _compare(renderer, dialogue.name, whole, recorded)


def _record(
    renderer: ChatRenderer,
    dialogue: _Dialogue,
    tools: Sequence[_Message] | None,
    template_kwargs: Mapping[str, object] | None,
) -> _Ids:
    messages = [_OPENING]
    tokens = renderer.render(messages, tools=tools, template_kwargs=template_kwargs)
    for turn in dialogue.turns:
        output = renderer.sample(messages, turn.assistant, tools=tools, template_kwargs=template_kwargs)
        tokens = np.concatenate([tokens, output])
        prompt = renderer.extend(
            tokens, turn.assistant, turn.following, tools=tools, template_kwargs=template_kwargs
        )
        tokens = np.concatenate([tokens[: prompt.keep], prompt.suffix])
        messages += [turn.assistant, *turn.following]
    return tokens


def _compare(renderer: ChatRenderer, name: str, whole: _Ids, recorded: _Ids) -> BoundaryCheck:
    decode = renderer.tokenizer.decode
    # The text, not the ids: a sampled newline after a newline of the prompt is two tokens here and one there.
    template, ours = decode(whole), decode(recorded)
    if template == ours:
        return BoundaryCheck(name=name, outcome=Outcome.OK)
    at = common_start(template, ours)
    # The first token whose end lies behind the first character that differs.
    position = bisect_right(range(len(recorded)), at, key=lambda n: len(decode(recorded[: n + 1])))
    start = len(decode(recorded[:position]))
    return BoundaryCheck(
        name=name,
        outcome=Outcome.DIFFERS,
        position=position,
        template=template[start : at + _EXCERPT_CHARS],
        recorded=ours[start : at + _EXCERPT_CHARS],
    )


def _call(*, count: int = 1, reasoning: bool = True, first: int = 0) -> _Message:
    calls = [
        {
            "id": f"functions.search:{i}",
            "type": "function",
            "function": {"name": "search", "arguments": {"query": f"cats {i}"}},
        }
        for i in range(first, first + count)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls} | _reasoning(reasoning)


def _answer(*, reasoning: bool = True) -> _Message:
    return {"role": "assistant", "content": "There are two."} | _reasoning(reasoning)


def _reasoning(wanted: bool) -> dict[str, str]:
    return {"reasoning_content": "Let me see."} if wanted else {}


def _result(i: int = 0) -> _Message:
    return {"role": "tool", "tool_call_id": f"functions.search:{i}", "content": f"{i} found"}


_OPENING: _Message = {"role": "user", "content": "How many cats are there?"}
_MORE: _Message = {"role": "user", "content": "And dogs?"}
_OTHER: _Message = {"role": "assistant", "content": "Or three."}
_SYSTEM: _Message = {"role": "system", "content": "Be brief."}
_TOOLS: Sequence[_Message] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds.",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]

_USER = _Dialogue("new user message, without reasoning", (_Turn(_answer(reasoning=False), (_MORE,)),))
_TOOL = _Dialogue("tool result, without reasoning", (_Turn(_call(reasoning=False), (_result(),)),), True)
_DIALOGUES = (
    _USER,
    _Dialogue("new user message, after reasoning", (_Turn(_answer(), (_MORE,)),)),
    _Dialogue("new user message, tools declared", (_Turn(_answer(reasoning=False), (_MORE,)),), True),
    _TOOL,
    _Dialogue("tool result, after reasoning", (_Turn(_call(), (_result(),)),), True),
    _Dialogue("results of parallel tool calls", (_Turn(_call(count=2), (_result(), _result(1))),), True),
    _Dialogue(
        "second tool result", (_Turn(_call(), (_result(),)), _Turn(_call(first=1), (_result(1),))), True
    ),
    _Dialogue(
        "new user message after a tool turn", (_Turn(_call(), (_result(),)), _Turn(_answer(), (_MORE,))), True
    ),
    _Dialogue("system message after a turn", (_Turn(_answer(reasoning=False), (_SYSTEM, _MORE)),)),
    _Dialogue("answer of the client after a turn", (_Turn(_answer(reasoning=False), (_OTHER, _MORE)),)),
)
