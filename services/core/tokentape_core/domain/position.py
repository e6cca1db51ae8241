"""Where a chat request belongs: the recorded turn that it continues, and what of it is new.

    the request repeats …                          linear session          tree session
    the newest turn, its answer too                goes on from it         goes on from it
    its input, and nothing follows: a retry        a sibling of it         a sibling of it
    neither, with other new messages: a revision   a sibling of it         a sibling, or a new root
    its input, with another answer: altered        `AnswerAltered`, or     a new root
                                                   goes on from the
                                                   recorded answer
    an older turn only                             `CannotExtend`          goes on from that
    all, with other tools or template arguments    `HeadChanged`           a new root

Nothing here changes state: a rejected request leaves no trace.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokentape_contracts import limits
from tokentape_contracts.errors import AnswerAltered, CannotExtend, HeadChanged, TurnTruncated
from tokentape_core.domain.canonical import equal_json, role_of
from tokentape_core.domain.match import Matcher, Message, contradicting_key, equivalent
from tokentape_core.domain.state import SessionState, Turn

MAX_STEP_BACK: Final = 1
"""A linear session's request may leave out at most this many of the newest turns."""

CallIds = Mapping[str, str]
"""Tool-call ids of a request → those that were recorded; without those that are the same."""
_SAME_IDS: Final[CallIds] = {}


@dataclass(frozen=True, slots=True)
class Head:
    """What a conversation's first turn fixes for all that follow, beside its messages.

    Attributes:
        tools: as the request lists them; None if it names none.
        template_kwargs: arguments for the chat template.
    """

    tools: list[Any] | None
    template_kwargs: Mapping[str, Any]

    def change_to(self, asked: "Head") -> str | None:
        """What another request of the conversation asks for that this head is not, or None.

        Left out is not changed: nor are tools in another order, or none at all.
        """
        if asked.tools and asked.tools != self.tools:
            ours, theirs = _by_name(self.tools or []), _by_name(asked.tools)
            for name in sorted(ours.keys() | theirs.keys()):
                if ours.get(name) != theirs.get(name):
                    what = "is new" if name not in ours else "is gone" if name not in theirs else "differs"
                    return f"tool {name!r} {what}"
        for name, value in asked.template_kwargs.items():
            if name not in self.template_kwargs:
                return f"template argument {name!r} is new: {_short(value)}"
            if not equal_json(before := self.template_kwargs[name], value):
                return f"template argument {name!r} was {_short(before)} and is {_short(value)}"
        return None

    def changed_by(self, asked: "Head") -> "Head":
        """The head of a new conversation that a request of this one begins: what it leaves out stays."""
        return Head(asked.tools or self.tools, {**self.template_kwargs, **asked.template_kwargs})


@dataclass(frozen=True, slots=True)
class Position:
    """Where a request attaches.

    Attributes:
        parent: the turn that it continues; None begins a conversation.
        new_messages: the request's messages after the parent's, with the recorded tool-call ids.
        head: what the prompt is rendered with: the recorded one, or a new conversation's own.
        altered: the places in the conversation of answers that came back altered and were kept as recorded.
        root: why it has no parent, one of `ROOTS`; None if it has one.
    """

    parent: Turn | None
    new_messages: list[dict[str, Any]]
    head: Head
    altered: tuple[int, ...] = ()
    root: str | None = None


ROOTS: Final = ("first", "unmatched", "head_changed", "not_appendable")
"""Why a turn has no parent: it is the session's first, or repeats no recorded turn, or has another head, or
the chat template cannot append its messages (which the renderer finds)."""


def new_root(messages: Sequence[dict[str, Any]], head: Head, root: str) -> Position:
    """The position of a request that begins a conversation."""
    return Position(None, list(messages), head, root=root)


def position(
    state: SessionState, messages: Sequence[dict[str, Any]], matcher: Matcher, asked: Head
) -> Position:
    """Finds the turn that a request continues: the deepest whose whole message path begins the request.

    Raises:
        AnswerAltered: a linear session's request brings a recorded answer back as another one.
        CannotExtend: it jumps further back than over the newest turn, or drops that turn's answer for an
            assistant message of its own.
        HeadChanged: it has other tools or template arguments than its conversation began with.
        TurnTruncated: in tree mode, the turn was cut at its length; what follows it would not be what the
            model meant to say.
    """
    echo = _Echo(messages, matcher)
    at = _in_tree(state, echo) if state.opened.mode == "tree" else _on_line(state, echo)
    if at.turn is None:
        return new_root(messages, asked, "unmatched" if state.turns else "first")
    recorded = Head(at.turn.tools, at.turn.template_kwargs)
    if (change := recorded.change_to(asked)) is None:
        new = [_with_recorded_ids(message, at.ids) for message in messages[at.turn.messages :]]
        return Position(at.turn, new, recorded, at.altered)
    if state.opened.mode == "tree":
        return new_root(messages, recorded.changed_by(asked), "head_changed")
    raise HeadChanged(
        f"{change}: tools and template arguments are a part of the prompt that turn {at.turn.path[0].seq} "
        "began. Keep them for the whole conversation, or leave them out, or open the session in mode tree"
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """A turn that the request repeats with its whole path, and what the request calls its tool calls."""

    turn: Turn | None
    ids: CallIds
    altered: tuple[int, ...] = ()

    @property
    def messages(self) -> int:
        return self.turn.messages if self.turn else 0


def _in_tree(state: SessionState, echo: "_Echo") -> _Place:
    place = _deepest(state, echo)
    if place.turn is None:
        return place
    if place.turn.event.finish == "length":
        raise TurnTruncated(
            f"the request continues turn {place.turn.seq}, which was cut at its length; branch off before "
            "it, or allow more tokens"
        )
    children = (turn for turn in state.turns if turn.parent is place.turn)
    if echo.brings_answers(place.messages) and any(echo.alters(child, place.ids) for child in children):
        return _Place(None, _SAME_IDS)
    return place


def _on_line(state: SessionState, echo: "_Echo") -> _Place:
    """The head if it is repeated, else the turn before it, or what another turn than the head made of that.

    Of two requests that were sent for one turn, the slower may be recorded last, after its client had given
    it up: the conversation goes on from the other.
    """
    place, rest = _follow(state, echo)
    if not rest:
        return place
    turn, left_out = rest[0], len(rest)
    other = _deepest(state, echo)
    if other.messages > place.messages and left_out <= MAX_STEP_BACK:
        return other
    if other.messages <= place.messages and echo.alters(turn, place.ids):
        raise AnswerAltered(echo.difference(turn))
    if left_out > MAX_STEP_BACK:
        raise CannotExtend(
            f"the request continues turn {other.turn.seq if other.turn else 0}, and the session has gone on "
            f"to turn {rest[-1].seq}: {echo.first_difference(turn, place.ids)}. A linear session may step "
            f"back over {MAX_STEP_BACK} turn, not {left_out}; mode tree takes any branch"
        )
    if echo.brings_answers(place.messages, turn.messages):
        raise CannotExtend(
            f"{echo.first_difference(turn, place.ids)}, and an assistant message stands where the answer of "
            f"turn {turn.seq} belongs, which would be lost. Send the recorded messages as they were, or open "
            "the session in mode tree"
        )
    return place


def _follow(state: SessionState, echo: "_Echo") -> tuple[_Place, Sequence[Turn]]:
    """How far the request repeats the path to the head, and the turns of that path which it does not."""
    path = state.head.path if state.head else []
    ids, altered, depth = _SAME_IDS, list[int](), 0
    for turn in path:
        after = echo.ids_after(turn, ids)
        if after is None and state.opened.altered_answer == "keep" and echo.alters(turn, ids):
            after = ids
            altered.append(turn.messages - 1)
        if after is None:
            break
        ids, depth = after, depth + 1
    return _Place(path[depth - 1] if depth else None, ids, tuple(altered)), path[depth:]


def _deepest(state: SessionState, echo: "_Echo") -> _Place:
    """The deepest repeated turn; of equally deep ones the newest."""
    repeated: dict[int, CallIds] = {0: _SAME_IDS}
    deepest = _Place(None, _SAME_IDS)
    for turn in state.turns:
        before = repeated.get(turn.event.parent)
        if before is not None and (ids := echo.ids_after(turn, before)) is not None:
            repeated[turn.seq] = ids
            if turn.messages >= deepest.messages:
                deepest = _Place(turn, ids)
    return deepest


class _Echo:
    """A request's messages, compared with those of recorded turns.

    `ids`, wherever it is passed, is how the request renamed the tool calls of the turns before.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], matcher: Matcher) -> None:
        self._messages = messages
        self._matcher = matcher
        self._renames = matcher is equivalent

    def ids_after(self, turn: Turn, ids: CallIds) -> CallIds | None:
        """How tool calls are renamed after this turn; None if the request does not repeat it in its place."""
        own = turn.event.messages
        theirs = self._messages[turn.messages - len(own) : turn.messages]
        # A conversation's messages come again with each of its turns, nearly always to the letter.
        if not ids and turn.is_text and theirs == own:
            return ids
        return self._compared(own, theirs, ids) if len(theirs) == len(own) else None

    def alters(self, turn: Turn, ids: CallIds) -> bool:
        """Whether the request repeats the turn's input, and then has another assistant message."""
        own = turn.event.messages
        theirs = self._messages[turn.messages - len(own) : turn.messages]
        if len(theirs) < len(own) or role_of(theirs[-1]) != "assistant":
            return False
        before = self._compared(own[:-1], theirs[:-1], ids)
        return before is not None and self._compared(own[-1:], theirs[-1:], before) is None

    def brings_answers(self, start: int, end: int | None = None) -> bool:
        """Whether there is an assistant message at these places of the request."""
        return any(role_of(message) == "assistant" for message in self._messages[start:end])

    def difference(self, turn: Turn) -> str:
        """What the request made of the turn's answer, for a person."""
        place = turn.messages - 1
        stored, incoming = turn.event.messages[-1], self._messages[place]
        key = contradicting_key(stored, incoming, self._matcher)
        # Where no key differs, the ids do, or a matcher of the user's has other reasons.
        key = key or ("tool_calls" if stored.get("tool_calls") else "content")
        before, after = _excerpts(stored.get(key), incoming.get(key))
        return (
            f"message {place} is not what turn {turn.seq} answered: {key} was {before} and is {after}. Send "
            "the answer back as it was; or open the session with altered_answer keep, which goes on from the "
            "recorded answer, or in mode tree, where this begins a new conversation"
        )

    def first_difference(self, turn: Turn, ids: CallIds) -> str:
        """The first message of the turn that the request does not repeat, for a person."""
        own = turn.event.messages
        start = turn.messages - len(own)
        for place, stored in enumerate(own, start):
            if place >= len(self._messages):
                last = turn.messages - 1
                return f"it has {len(self._messages)} messages, turn {turn.seq} ends with message {last}"
            incoming = self._messages[place]
            after = self._compared([stored], [incoming], ids)
            if after is None:
                return f"message {place} (role {incoming.get('role')!r}) differs from the recorded one"
            ids = after
        raise ValueError(f"turn {turn.seq} is repeated in whole")

    def _compared(self, own: Sequence[Message], theirs: Sequence[Message], ids: CallIds) -> CallIds | None:
        """As `ids_after`, of equally many messages."""
        for stored, incoming in zip(own, theirs, strict=True):
            if not self._matcher(stored, incoming):
                return None
            if self._renames:
                after = _renamed(stored, incoming, ids)
                if after is None:
                    return None
                ids = after
        return ids


def _renamed(stored: Message, incoming: Message, ids: CallIds) -> CallIds | None:
    """The renaming after one message; None if the message contradicts it.

    The ids of one message's calls are renamed one to one. A later message may use an id again for a call of
    its own, as engines do that number the calls of each answer; a tool message answers the newest.
    """
    answered = incoming.get("tool_call_id")
    if answered and stored.get("tool_call_id") and isinstance(answered, str):
        return ids if ids.get(answered, answered) == stored["tool_call_id"] else None
    pairs = list(_call_ids(stored, incoming))
    if not pairs:
        return ids
    if len(dict(pairs)) != len(set(pairs)) or len({recorded for _, recorded in pairs}) != len(set(pairs)):
        return None
    if all(theirs == ours and theirs not in ids for theirs, ours in pairs):
        return ids
    return {theirs: ours for theirs, ours in {**ids, **dict(pairs)}.items() if theirs != ours}


def _call_ids(stored: Message, incoming: Message) -> Iterator[tuple[str, str]]:
    """The ids of equal calls: the request's, the recorded one."""
    ours, theirs = stored.get("tool_calls"), incoming.get("tool_calls")
    if isinstance(ours, list) and isinstance(theirs, list):
        for our, their in zip(ours, theirs, strict=False):
            if isinstance(our, dict) and isinstance(their, dict):
                pair = their.get("id"), our.get("id")
                if isinstance(pair[0], str) and isinstance(pair[1], str) and all(pair):
                    yield pair[0], pair[1]


def _with_recorded_ids(message: dict[str, Any], ids: CallIds) -> dict[str, Any]:
    answered = message.get("tool_call_id")
    if isinstance(answered, str) and answered in ids:
        return {**message, "tool_call_id": ids[answered]}
    return message


def _by_name(tools: Sequence[Any]) -> dict[str, list[str]]:
    """A tool's name → its definitions as text that equal ones share."""
    named: dict[str, list[str]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        text = json.dumps(tool, sort_keys=True)
        named.setdefault(name if isinstance(name, str) else text, []).append(text)
    return {name: sorted(texts) for name, texts in named.items()}


def _excerpts(before: Any, after: Any) -> tuple[str, str]:
    """Both values as JSON, cut to the same place around their first difference."""
    ours, theirs = json.dumps(before, ensure_ascii=False), json.dumps(after, ensure_ascii=False)
    shared = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    start = max(0, shared - limits.QUOTED_VALUE_CHARS // 4)
    return _cut(ours, start), _cut(theirs, start)


def _short(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False), 0)


def _cut(text: str, start: int) -> str:
    end = start + limits.QUOTED_VALUE_CHARS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
