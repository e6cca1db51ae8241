"""Decisions: may a session go on, and which event does a generation become?

Nothing here changes state. A rejected or failed request therefore leaves no trace: the head moves only when
an event is in the stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokentape_contracts import limits
from tokentape_contracts.errors import EngineReplyInvalid, PrefixBroken, SessionDeleted, SessionFull
from tokentape_contracts.events import Blob, Floats, Ids, TurnRecorded
from tokentape_contracts.tokens import first_bad_log_prob
from tokentape_core.domain.position import Position
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


def record_turn(
    state: SessionState,
    at: Position,
    keep: int,
    suffix: Ids,
    generation: Generation,
    *,
    event_id: str,
    vocabulary: int,
    request: Mapping[str, Any],
    replay: Mapping[str, Blob],
    requested_at: float,
    committed_at: float,
) -> TurnRecorded:
    """The event of one generation.

    Args:
        keep: how many of the parent's tokens the prompt reused.
        suffix: int32[S], the prompt's other tokens.
        vocabulary: ids below this are the tokenizer's.
        replay: what is stored of the engine's routing replay rows.

    Raises:
        PrefixBroken: the prompt would drop more of the parent's tokens than the family allows (INV-2).
        EngineReplyInvalid: no model samples such tokens: see `_ensure_possible`.
    """
    parent_length = at.parent.length if at.parent else 0
    trimmed = parent_length - keep
    if keep < 0 or not 0 <= trimmed <= state.opened.max_trim_tokens:
        raise PrefixBroken(f"the prompt keeps {keep} of the parent's {parent_length} tokens")
    _ensure_possible(generation, vocabulary)
    inherited = at.parent.tools if at.parent else None
    return TurnRecorded(
        id=event_id,
        parent=at.parent.seq if at.parent else 0,
        keep=keep,
        suffix=suffix,
        output=generation.output,
        logprobs=generation.logprobs,
        finish=generation.finish,
        response_id=generation.response_id,
        messages=[*at.new_messages, {**generation.message, "role": "assistant"}],
        tools=None if at.head.tools == inherited else at.head.tools,
        altered=list(at.altered),
        request=request,
        reply=generation.reply,
        meta=generation.meta,
        replay=replay,
        requested_at=requested_at,
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
