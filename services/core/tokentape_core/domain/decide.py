"""Decisions: where a request belongs, and which event a generation becomes.

Nothing here changes state. A rejected or failed request therefore leaves no trace: the head moves only when
an event is in the stream.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokentape_contracts import limits
from tokentape_contracts.errors import (
    CannotExtend,
    EngineReplyInvalid,
    PrefixBroken,
    SessionDeleted,
    SessionFull,
    TurnTruncated,
)
from tokentape_contracts.events import Blob, Floats, Ids, TurnRecorded
from tokentape_core.domain.match import Matcher, Message
from tokentape_core.domain.state import SessionState, Turn

MAX_STEP_BACK = 1
"""A linear session's request may leave out at most this many of the newest turns: a retry."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where a request attaches.

    Attributes:
        parent: the turn that it continues; None begins a conversation.
        new_messages: the request's messages after the parent's.
    """

    parent: Turn | None
    new_messages: list[dict[str, Any]]


def ensure_open(state: SessionState) -> None:
    """Refuses a session that takes no further turn.

    Raises:
        SessionDeleted: it was sealed.
        SessionFull: it holds `limits.TURNS_PER_SESSION` turns.
    """
    if state.sealed is not None:
        raise SessionDeleted("the session was deleted")
    if len(state.turns) >= limits.TURNS_PER_SESSION:
        raise SessionFull(f"the session holds {len(state.turns)} turns, as many as it may")


def position(state: SessionState, messages: Sequence[dict[str, Any]], matcher: Matcher) -> Position:
    """Finds the turn that a request continues: the deepest whose whole message path begins the request.

    A linear session's request may continue the head, or step back over the newest turn: a retry, also of the
    first turn, or the continuation of another answer to the same request. In tree mode any turn can be
    continued, and a request that continues none begins a new root.

    Raises:
        CannotExtend: a linear session's request jumps further back than that.
        TurnTruncated: in tree mode, the turn was cut at its length; what follows it would not be what the
            model meant to say.
    """
    parent = (
        _in_tree(state, messages, matcher)
        if state.opened.mode == "tree"
        else _on_line(state, messages, matcher)
    )
    return Position(parent, list(messages[parent.messages if parent else 0 :]))


def _in_tree(state: SessionState, messages: Sequence[Message], matcher: Matcher) -> Turn | None:
    deepest = _deepest(state, messages, matcher)
    if deepest is not None and deepest.event.finish == "length":
        raise TurnTruncated(
            f"the request continues turn {deepest.seq}, which was cut at its length; branch off before it, "
            "or allow more tokens"
        )
    return deepest


def _on_line(state: SessionState, messages: Sequence[Message], matcher: Matcher) -> Turn | None:
    """The head if it is repeated, else the turn before it, or what another turn than the head made of that.

    Of two requests that were sent for one turn, the slower may be recorded last, after its client had given
    it up: the conversation goes on from the other.
    """
    path = state.head.path if state.head else []
    matched = _matching_turns(path, messages, matcher)
    left_out = len(path) - matched
    if left_out > MAX_STEP_BACK:
        differs = _first_difference(path[matched], messages, matcher)
        raise CannotExtend(
            f"the request continues turn {matched} of {len(path)}: {differs}. A linear session may step back "
            f"over {MAX_STEP_BACK} turn, not {left_out}"
        )
    return _deepest(state, messages, matcher) if left_out else state.head


def _deepest(state: SessionState, messages: Sequence[Message], matcher: Matcher) -> Turn | None:
    """The deepest repeated turn; of equally deep ones the newest."""
    repeated = {0}
    deepest: Turn | None = None
    for turn in state.turns:
        if turn.event.parent in repeated and _is_repeated(turn, messages, matcher):
            repeated.add(turn.seq)
            if deepest is None or turn.messages >= deepest.messages:
                deepest = turn
    return deepest


def _matching_turns(path: Sequence[Turn], messages: Sequence[Message], matcher: Matcher) -> int:
    """How many turns of the path the request repeats in whole."""
    for count, turn in enumerate(path):
        if not _is_repeated(turn, messages, matcher):
            return count
    return len(path)


def _is_repeated(turn: Turn, messages: Sequence[Message], matcher: Matcher) -> bool:
    """Whether the request repeats this turn's own messages where they belong."""
    own = turn.event.messages
    theirs = messages[turn.messages - len(own) : turn.messages]
    # A conversation's messages come again with each of its turns, nearly always to the letter.
    if turn.is_text and theirs == own:
        return True
    return len(theirs) == len(own) and all(map(matcher, own, theirs))


def _first_difference(turn: Turn, messages: Sequence[Message], matcher: Matcher) -> str:
    start = turn.messages - len(turn.event.messages)
    for index, stored in enumerate(turn.event.messages, start):
        if index >= len(messages):
            return (
                f"it has {len(messages)} messages, the next recorded turn ends with message {turn.messages}"
            )
        if not matcher(stored, messages[index]):
            return f"message {index} (role {messages[index].get('role')!r}) differs from the recorded one"
    raise ValueError(f"turn {turn.seq} is repeated in whole")


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
    tools: list[Any] | None,
    request: Mapping[str, Any],
    replay: Mapping[str, Blob],
    requested_at: float,
    committed_at: float,
) -> TurnRecorded:
    """The event of one generation.

    Args:
        keep: how many of the parent's tokens the prompt reused.
        suffix: int32[S], the prompt's other tokens.
        tools: the tools that were in force.
        replay: what is stored of the engine's replay rows.

    Raises:
        PrefixBroken: the prompt would drop more of the parent's tokens than the family allows (INV-2).
        EngineReplyInvalid: tokens and log-probs differ in number, or a log-prob is not finite.
    """
    parent_length = at.parent.length if at.parent else 0
    trimmed = parent_length - keep
    if keep < 0 or not 0 <= trimmed <= state.opened.max_trim_tokens:
        raise PrefixBroken(f"the prompt keeps {keep} of the parent's {parent_length} tokens")
    if len(generation.output) != len(generation.logprobs):
        raise EngineReplyInvalid(
            f"{len(generation.output)} output tokens but {len(generation.logprobs)} log-probs"
        )
    if not np.isfinite(generation.logprobs).all():
        first = int(np.flatnonzero(~np.isfinite(generation.logprobs))[0])
        raise EngineReplyInvalid(f"the log-prob of output token {first} is {generation.logprobs[first]}")
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
        messages=[*at.new_messages, generation.message],
        tools=None if tools == inherited else tools,
        request=request,
        reply=generation.reply,
        meta=generation.meta,
        replay=replay,
        requested_at=requested_at,
        committed_at=committed_at,
    )
