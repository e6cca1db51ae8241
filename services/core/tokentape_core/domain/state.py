"""A session's state: what its events say, folded.

Everything here is immutable. Shapes: `S` suffix tokens, `O` output tokens, `T` tokens of a path.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentape_contracts.errors import StreamCorrupt
from tokentape_contracts.events import (
    OPENED_ID,
    SEALED_ID,
    Event,
    Ids,
    SessionOpened,
    SessionSealed,
    TurnRecorded,
)
from tokentape_core.domain.match import is_text
from tokentape_core.domain.size import size_of


@dataclass(frozen=True, eq=False)
class Turn:
    """A node of the forest.

    Attributes:
        seq: its place in the stream, 1 or more.
        event: what was recorded.
        parent: the turn it continues, or None for a root.
        prompt_length: tokens that the engine received.
        length: prompt and output tokens.
        messages: messages of the path up to and with this turn's answer.
        tools: the tools in force: its own, else those of the nearest turn above that names some.
    """

    seq: int
    event: TurnRecorded
    parent: "Turn | None"
    prompt_length: int
    length: int
    messages: int
    tools: list[dict[str, Any]] | None

    @cached_property
    def is_text(self) -> bool:
        """Of the event's messages: see `match.is_text`. Only who compares messages asks for it."""
        return is_text(self.event.messages)

    @property
    def path(self) -> "list[Turn]":
        """The turns from the root to this one."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def tokens(self) -> Ids:
        """int32[T]: the prompt as the engine received it, then the output. Built anew at each call."""
        path = self.path
        tokens = np.empty(max([turn.length for turn in path]), np.int32)
        for turn in path:
            tokens[turn.event.keep : turn.prompt_length] = turn.event.suffix
            tokens[turn.prompt_length : turn.length] = turn.event.output
        return tokens[: self.length]

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """bool[T]: which of `tokens` were sampled, here or further up. Built anew at each call."""
        path = self.path
        sampled = np.zeros(max(turn.length for turn in path), np.bool_)
        for turn in path:
            sampled[turn.event.keep : turn.prompt_length] = False
            sampled[turn.prompt_length : turn.length] = True
        return sampled[: self.length]

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """The arguments of the chat template that its prompt was rendered with."""
        given: Mapping[str, Any] = self.event.request.get("chat_template_kwargs") or {}
        return given


@dataclass(frozen=True, slots=True, eq=False)
class SessionState:
    """All that the events say.

    Attributes:
        opened: how the session was opened.
        turns: turn number `seq` is `turns[seq - 1]`.
        head: of a tree the newest turn; of a linear session the one that its conversation has come to, which
            is the newest unless that was requested before the conversation went on.
        sealed: the end, if it came.
        size: bytes of memory that its events take (`domain.size`).
    """

    opened: SessionOpened
    turns: tuple[Turn, ...] = ()
    head: Turn | None = None
    sealed: SessionSealed | None = None
    size: int = 0

    @property
    def last_id(self) -> str:
        """The id of the last entry that was folded."""
        if self.sealed is not None:
            return SEALED_ID
        return turn_id(len(self.turns)) if self.turns else OPENED_ID


def turn_id(seq: int) -> str:
    """The stream id of turn number `seq`."""
    return f"{seq}-0"


def apply(state: SessionState | None, entry_id: str, event: Event) -> SessionState:
    """The state after one more entry.

    Raises:
        StreamCorrupt: the entry does not follow (INV-3): a gap, an entry after the seal, an unknown parent.
    """
    if state is None:
        if entry_id != OPENED_ID or not isinstance(event, SessionOpened):
            raise StreamCorrupt(f"a stream begins with {SessionOpened.TYPE} at {OPENED_ID}, not {entry_id}")
        return SessionState(event, size=size_of(event))
    if state.sealed is not None:
        raise StreamCorrupt(f"entry {entry_id} follows the seal")
    match event:
        case SessionSealed() if entry_id == SEALED_ID:
            return replace(state, sealed=event, size=state.size + size_of(event))
        case TurnRecorded() if entry_id == turn_id(len(state.turns) + 1):
            turn = _turn(state, event)
            head = turn if state.opened.mode == "tree" or is_near(state.head, turn.parent) else state.head
            return SessionState(state.opened, (*state.turns, turn), head, size=state.size + size_of(event))
    raise StreamCorrupt(f"{event.TYPE} at {entry_id} does not follow {state.last_id}")


def fold(entries: Iterable[tuple[str, Event]], state: SessionState | None = None) -> SessionState | None:
    """The state after all entries, from `state` on; None if there are none."""
    for entry_id, event in entries:
        state = apply(state, entry_id, event)
    return state


def is_near(head: Turn | None, turn: Turn | None) -> bool:
    """Whether a linear conversation that has come to `head` can go on from `turn`; None is its beginning.

    It can from the head, from the turn before it, and from another answer in the head's place. A turn from
    anywhere else was requested earlier and came late, as a side request does that takes long.
    """
    if head is None or turn is head or turn is head.parent:
        return True
    return turn is not None and turn.parent is head.parent


def _turn(state: SessionState, event: TurnRecorded) -> Turn:
    seq = len(state.turns) + 1
    if not 0 <= event.parent < seq:
        raise StreamCorrupt(f"turn {seq} names turn {event.parent} as its parent")
    parent = state.turns[event.parent - 1] if event.parent else None
    if not 0 <= event.keep <= (parent.length if parent else 0):
        raise StreamCorrupt(f"turn {seq} keeps {event.keep} tokens of turn {event.parent}, which has fewer")
    prompt_length = event.keep + len(event.suffix)
    messages = (parent.messages if parent else 0) + len(event.messages)
    length = prompt_length + len(event.output)
    tools = event.tools if event.tools is not None or parent is None else parent.tools
    return Turn(seq, event, parent, prompt_length, length, messages, tools)
