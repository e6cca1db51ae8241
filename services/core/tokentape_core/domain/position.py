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
from tokentape_core.domain.canonical import MARKS, equal_json, role_of
from tokentape_core.domain.match import Matcher, Message, contradicting_key, equivalent
from tokentape_core.domain.state import SessionState, Turn, is_near
from tokentape_core.texts import common_start


@dataclass(frozen=True, slots=True)
class CallIds:
    """How a request calls the tool calls of the turns that it repeats.

    Attributes:
        renamed: the request's id → the recorded one, of one message's calls.
        before: the same of the messages before; None at the beginning, and while nothing is renamed.
    """

    renamed: Mapping[str, str]
    before: "CallIds | None" = None

    def recorded(self, call_id: str) -> str:
        """The recorded id; of calls with the same id the newest's."""
        ids: CallIds | None = self
        while ids is not None:
            if call_id in ids.renamed:
                return ids.renamed[call_id]
            ids = ids.before
        return call_id


_SAME_IDS: Final = CallIds({})


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
    echo = _Echo(messages, matcher, asked)
    at = _in_tree(state, echo) if state.opened.mode == "tree" else _on_line(state, echo)
    if at.turn is None:
        return new_root(messages, asked, "unmatched" if state.turns else "first")
    recorded = _head_of(at.turn)
    if (change := recorded.change_to(asked)) is None:
        return Position(at.turn, echo.new_messages(at), recorded, _first_time(at))
    if state.opened.mode == "tree":
        return new_root(messages, recorded.changed_by(asked), "head_changed")
    raise HeadChanged(
        f"{change}: tools and template arguments are a part of the prompt that turn {at.turn.path[0].seq} "
        "began. Keep them for the whole conversation, or leave them out, or open the session in mode tree"
    )


def _head_of(turn: Turn) -> Head:
    return Head(turn.tools, turn.template_kwargs)


def _first_time(at: "_Place") -> tuple[int, ...]:
    """The altered answers that no turn before names: clients send theirs with every request again."""
    if not at.altered or at.turn is None:
        return ()
    known = {place for turn in at.turn.path for place in turn.event.altered}
    return tuple(place for place in at.altered if place not in known)


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
    if place.turn.event.finish == "length" and echo.keeps_head(place):
        raise TurnTruncated(
            f"the request continues turn {place.turn.seq}, which was cut at its length; branch off before "
            "it, or allow more tokens"
        )
    children = (turn for turn in state.turns if turn.parent is place.turn)
    if echo.brings_answers(place.messages) and any(echo.alters(child, place.ids) for child in children):
        return _Place(None, _SAME_IDS)
    return place


def _on_line(state: SessionState, echo: "_Echo") -> _Place:
    """The head if it is repeated, else another answer in its place, or the turn before it.

    Of two requests that were sent for one turn, the slower may be recorded last, after its client had given
    it up: the conversation goes on from the other.
    """
    path = state.head.path if state.head else []
    ids, depth = _SAME_IDS, 0
    for turn in path:
        after = echo.ids_after(turn, ids)
        if after is None:
            break
        ids, depth = after, depth + 1
    place = _Place(path[depth - 1] if depth else None, ids)
    if state.head is None or (place.turn is state.head and echo.keeps_head(place)):
        return place
    best = _deepest(state, echo, path, keeps=state.opened.altered_answer == "keep")
    if best.turn is not None and best.turn.parent is state.head.parent:  # the head or one in its place
        return best
    if place.turn is state.head:
        return place
    if best.turn is None or best.turn in path:
        place = best
    return _stepping_back(state.head, place, best, echo)


def _stepping_back(head: Turn, place: _Place, best: _Place, echo: "_Echo") -> _Place:
    """The place, if the request may go on from there in place of the head.

    Args:
        place: how far the request repeats the path to the head, which is not all of it.
        best: the deepest turn that it repeats, wherever that is.
    """
    turn = next(turn for turn in head.path if turn.parent is place.turn)
    if place is best and echo.alters(turn, place.ids):
        raise AnswerAltered(echo.difference(turn))
    difference = echo.first_difference(turn, place.ids)
    if not is_near(head, best.turn):
        raise CannotExtend(
            f"the request continues turn {best.turn.seq if best.turn else 0}, and the session has gone on "
            f"to turn {head.seq}: {difference}. A linear session may step back over its newest turn, and "
            "no further; mode tree takes any branch"
        )
    if echo.answers_instead(turn, place.messages):
        raise CannotExtend(
            f"{difference}, and an assistant message stands where the answer of turn {turn.seq} belongs, "
            "which would be lost. Send the recorded messages as they were, or open the session in mode tree"
        )
    return place


def _deepest(state: SessionState, echo: "_Echo", line: Sequence[Turn] = (), *, keeps: bool = False) -> _Place:
    """The deepest repeated turn.

    Of equally deep ones one with the request's head goes first, then one of the `line`, then the newest. With
    `keeps` an answer may have come back altered; one with fewer such goes before the others.
    """
    on_line = {turn.seq for turn in line}
    repeated: dict[int, _Place] = {0: _Place(None, _SAME_IDS)}
    deepest = repeated[0]
    for turn in state.turns:
        before = repeated.get(turn.event.parent)
        if before is None:
            continue
        ids, altered = echo.ids_after(turn, before.ids), before.altered
        if ids is None and keeps and echo.alters(turn, before.ids):
            ids, altered = before.ids, (*altered, turn.messages - 1)
        if ids is None:
            continue
        place = repeated[turn.seq] = _Place(turn, ids, altered)
        fit, best = echo.fit(place, deepest), echo.fit(deepest, place)
        if fit > best or (fit == best and (deepest.turn is None or deepest.turn.seq not in on_line)):
            deepest = place
    return deepest


class _Echo:
    """A request's messages, compared with those of recorded turns.

    `ids`, wherever it is passed, is how the request calls the tool calls of the turns before.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], matcher: Matcher, asked: Head) -> None:
        self._messages = messages
        self._matcher = matcher
        self._asked = asked
        self._renames = matcher is equivalent

    def ids_after(self, turn: Turn, ids: CallIds) -> CallIds | None:
        """How tool calls are renamed after this turn; None if the request does not repeat it in its place."""
        own = turn.event.messages
        theirs = self._messages[turn.messages - len(own) : turn.messages]
        # A conversation's messages come again with each of its turns, nearly always to the letter.
        if ids is _SAME_IDS and turn.is_text and theirs == own:
            return ids
        # The answer first: of many turns with one beginning, most differ in that.
        if len(theirs) != len(own) or not self._matches(own[-1:], theirs[-1:]):
            return None
        return self._ids_over(own, theirs, ids) if self._matches(own[:-1], theirs[:-1]) else None

    def alters(self, turn: Turn, ids: CallIds) -> bool:
        """Whether the request repeats the turn's input, and then has another assistant message."""
        own = turn.event.messages
        theirs = self._messages[turn.messages - len(own) : turn.messages]
        if not own or len(theirs) < len(own) or role_of(theirs[-1]) != "assistant":
            return False
        before = self._compared(own[:-1], theirs[:-1], ids)
        return before is not None and self._compared(own[-1:], theirs[-1:], before) is None

    def brings_answers(self, start: int) -> bool:
        """Whether there is an assistant message from this place of the request on."""
        return any(role_of(message) == "assistant" for message in self._messages[start:])

    def answers_instead(self, turn: Turn, start: int) -> bool:
        """Whether a request that does not repeat the turn has an answer for it all the same.

        That is an assistant message in the place of the turn's answer, unless the request has nothing of the
        turn; or that answer in another place.
        """
        own, place = turn.event.messages, turn.messages - 1
        begins = own and self._messages[start:] and self._matcher(own[0], self._messages[start])
        if begins and any(role_of(message) == "assistant" for message in self._messages[place : place + 1]):
            return True
        given = len(own) - 1  # what the client sent with the turn may hold answers of its own
        rest = self._messages[start:]
        same = next(
            (i for i, pair in enumerate(zip(own[:-1], rest, strict=False)) if not self._matcher(*pair)), given
        )
        return any(role_of(m) == "assistant" and self._matcher(own[-1], m) for m in rest[same:])

    def keeps_head(self, place: "_Place") -> bool:
        """Whether the request's head is that of the place."""
        return place.turn is None or _head_of(place.turn).change_to(self._asked) is None

    def fit(self, place: "_Place", other: "_Place") -> tuple[int, int, bool]:
        """How well the request fits to the place, to compare with the other, which fits as `fit` says."""
        fit = place.messages, -len(place.altered)
        # Heads are long: they are looked at only where nothing else decides.
        is_tied = fit == (other.messages, -len(other.altered))
        return (*fit, is_tied and self.keeps_head(place))

    def new_messages(self, place: "_Place") -> list[dict[str, Any]]:
        """The messages after those of the place, with the recorded ids of the calls that they answer."""
        new = list(self._messages[place.messages :])
        if place.ids is _SAME_IDS:
            return new
        own: set[object] = set()  # calls of an answer that the client brings
        for index, message in enumerate(new):
            answered = message.get("tool_call_id")
            if isinstance(answered, str) and answered not in own:
                new[index] = {**message, "tool_call_id": place.ids.recorded(answered)}
            own.update(their for their, _ in _call_ids(message, message))
        return new

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
        for place, stored in enumerate(own, turn.messages - len(own)):
            if place >= len(self._messages):
                last = turn.messages - 1
                return f"it has {len(self._messages)} messages, turn {turn.seq} ends with message {last}"
            incoming = self._messages[place]
            after = self._compared([stored], [incoming], ids)
            if after is None:
                return f"message {place} (role {incoming.get('role')!r}) differs from the recorded one"
            ids = after
        return f"turn {turn.seq} is not repeated as a whole"

    def _compared(self, own: Sequence[Message], theirs: Sequence[Message], ids: CallIds) -> CallIds | None:
        """As `ids_after`, of equally many messages."""
        return self._ids_over(own, theirs, ids) if self._matches(own, theirs) else None

    def _matches(self, own: Sequence[Message], theirs: Sequence[Message]) -> bool:
        return all(map(self._matcher, own, theirs))

    def _ids_over(self, own: Sequence[Message], theirs: Sequence[Message], ids: CallIds) -> CallIds | None:
        """The ids after these messages, each of which matches; None if they are not renamed consistently."""
        for stored, incoming in zip(own, theirs, strict=True) if self._renames else ():
            after = _renamed(stored, incoming, ids)
            if after is None:
                return None
            ids = after
        return ids


def _renamed(stored: Message, incoming: Message, ids: CallIds) -> CallIds | None:
    """The ids after one message; None if the message contradicts them.

    A later message may use an id again for a call of its own, as engines do that number the calls of each
    answer; a tool message answers the newest.
    """
    answered = incoming.get("tool_call_id")
    if answered and stored.get("tool_call_id") and isinstance(answered, str):
        return ids if ids.recorded(answered) == stored["tool_call_id"] else None
    pairs = list(_call_ids(stored, incoming))
    renamed = dict(pairs)
    if len(renamed) != len(set(pairs)):  # one id for two calls: nobody could tell which of them is answered
        return None
    if not pairs or (ids is _SAME_IDS and all(theirs == ours for theirs, ours in pairs)):
        return ids
    return CallIds(renamed, ids)


def _call_ids(stored: Message, incoming: Message) -> Iterator[tuple[str, str]]:
    """The ids of equal calls: the request's, the recorded one."""
    ours, theirs = stored.get("tool_calls"), incoming.get("tool_calls")
    if isinstance(ours, list) and isinstance(theirs, list):
        for our, their in zip(ours, theirs, strict=False):
            if isinstance(our, dict) and isinstance(their, dict):
                pair = their.get("id"), our.get("id")
                if isinstance(pair[0], str) and isinstance(pair[1], str) and all(pair):
                    yield pair[0], pair[1]


def _by_name(tools: Sequence[Any]) -> dict[str, set[str]]:
    """A tool's name → its definitions, as text that equal ones share."""
    named: dict[str, set[str]] = {}
    for tool in tools:
        function = tool.get("function") if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        text = json.dumps(_said(tool), sort_keys=True)
        named.setdefault(name if isinstance(name, str) else text, set()).add(text)
    return named


def _said(value: Any) -> Any:
    """A tool without what says nothing: nulls, and marks like `cache_control`."""
    if not isinstance(value, dict):
        return value
    return {k: _said(v) for k, v in value.items() if v is not None and k not in MARKS}


def _excerpts(before: Any, after: Any) -> tuple[str, str]:
    """Both values as JSON, cut to the same place around their first difference."""
    ours, theirs = json.dumps(before, ensure_ascii=False), json.dumps(after, ensure_ascii=False)
    start = max(0, common_start(ours, theirs) - limits.QUOTED_VALUE_CHARS // 4)
    return _cut(ours, start), _cut(theirs, start)


def _short(value: Any) -> str:
    return _cut(json.dumps(value, ensure_ascii=False), 0)


def _cut(text: str, start: int) -> str:
    end = start + limits.QUOTED_VALUE_CHARS
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
