"""Decisions: may a session go on, what is the engine asked, and which event does its generation become?

Nothing here changes state. A rejected or failed request therefore leaves no trace: the head moves only when
an event is in the stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, PrefixBroken, SessionDeleted, SessionFull
from tokentape_contracts.events import Blob, Floats, Ids, TurnRecorded
from tokentape_contracts.http import pinned
from tokentape_contracts.tokens import first_bad_log_prob
from tokentape_core.domain.position import Position
from tokentape_core.domain.request import ChatRequest
from tokentape_core.domain.state import SessionState


def ensure_open(state: SessionState) -> None:
    """Refuses a session that takes no further turn.

    Raises:
        SessionDeleted: it was sealed.
        SessionFull: it holds `limits.TURNS_PER_SESSION` turns, or `limits.SESSION_BYTES` of them.
    """
    if state.sealed is not None:
        raise SessionDeleted("the session was deleted")
    if len(state.turns) >= limits.TURNS_PER_SESSION:
        raise SessionFull(f"the session holds {len(state.turns)} turns, as many as it may")
    if state.size >= limits.SESSION_BYTES:
        raise SessionFull(f"the session's turns take {state.size} bytes, as many as they may")


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What the engine produced.

    Attributes:
        output: int32[O], the stop token included.
        logprobs: float64[O].
        finish: finish reason.
        response_id: the engine's id of the answer.
        message: the assistant's message.
        reply: the rest of the answer.
        meta: counters.
    """

    output: Ids
    logprobs: Floats
    finish: str
    response_id: str
    message: dict[str, Any]
    reply: Mapping[str, Any]
    meta: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A turn before its generation.

    Attributes:
        at: where it belongs.
        keep: how many of the parent's tokens the prompt reuses.
        suffix: int32[S], the prompt's other tokens.
        messages: the whole conversation as the request has it.
        settings: how to sample, pins and template arguments included.
        requested_at: Unix seconds.
    """

    at: Position
    keep: int
    suffix: Ids
    messages: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any]
    requested_at: float

    @property
    def prompt(self) -> Ids:
        """int32[P], all tokens of the prompt."""
        if self.at.parent is None:
            return self.suffix
        return np.concatenate([self.at.parent.tokens[: self.keep], self.suffix])

    @property
    def request(self) -> dict[str, Any]:
        """What the engine is asked beside the prompt: it reads an answer by messages and tools."""
        tools = {"tools": self.at.head.tools} if self.at.head.tools else {}
        return {**self.settings, "messages": self.messages, **tools}


def draft_turn(
    state: SessionState, asked: ChatRequest, at: Position, keep: int, suffix: Ids, requested_at: float
) -> Draft:
    """The turn that a request asks for, at its position and with its prompt.

    Raises:
        PrefixBroken: the prompt would drop more of the parent's tokens than the family allows (INV-2).
    """
    parent_length = at.parent.length if at.parent else 0
    if keep < 0 or not 0 <= parent_length - keep <= state.opened.max_trim_tokens:
        raise PrefixBroken(f"the prompt keeps {keep} of the parent's {parent_length} tokens")
    settings = pinned(asked.settings, state.opened.pins)
    if at.head.template_kwargs:
        settings["chat_template_kwargs"] = at.head.template_kwargs
    if at.head.tools and asked.head.tools == []:
        # They stay in the prompt of a conversation that empties them, and must not be called.
        settings.setdefault("tool_choice", "none")
    return Draft(at, keep, suffix, asked.messages, settings, requested_at)


def record_turn(
    draft: Draft,
    generation: Generation,
    *,
    event_id: str,
    vocabulary: int,
    replay: Mapping[str, Blob],
    committed_at: float,
) -> TurnRecorded:
    """The event of a draft's generation.

    Args:
        vocabulary: ids below this are the tokenizer's.
        replay: what is stored of the engine's routing replay rows.

    Raises:
        EngineReplyInvalid: no model samples such tokens: see `_ensure_possible`.
    """
    _ensure_possible(generation, vocabulary)
    at = draft.at
    inherited = at.parent.tools if at.parent else None
    return TurnRecorded(
        id=event_id,
        parent=at.parent.seq if at.parent else 0,
        keep=draft.keep,
        suffix=draft.suffix,
        output=generation.output,
        logprobs=generation.logprobs,
        finish=generation.finish,
        response_id=generation.response_id,
        messages=[*at.new_messages, {**generation.message, "role": "assistant"}],
        tools=None if at.head.tools == inherited else at.head.tools,
        altered=list(at.altered),
        request=draft.settings,
        reply=generation.reply,
        meta=generation.meta,
        replay=replay,
        requested_at=draft.requested_at,
        committed_at=committed_at,
    )


def _ensure_possible(generation: Generation, vocabulary: int) -> None:
    """Refuses tokens that no model samples: a sample of them would train on noise."""
    output, logprobs = generation.output, generation.logprobs
    if len(output) != len(logprobs):
        raise EngineReplyInvalid(f"{len(output)} output tokens but {len(logprobs)} log-probs")
    if not len(output):
        return
    if not 0 <= output.min() <= output.max() < vocabulary:
        strange = output[(output < 0) | (output >= vocabulary)][0]
        raise EngineReplyInvalid(
            f"the engine sampled token {strange}, but the tokenizer has {vocabulary}: give the tokenizer of "
            "the model that the engine serves"
        )
    if (wrong := first_bad_log_prob(logprobs)) is not None:
        raise EngineReplyInvalid(f"the log-prob of output token {wrong} is {logprobs[wrong]}")
