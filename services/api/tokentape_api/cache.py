"""Folded sessions that this process has seen.

A cache and nothing else: a session's truth is its stream, and every use reads what is newer there first. So
any API process serves any session at any moment (INV-4); one that has never seen it pays one full read.
"""

from collections import OrderedDict

import orjson

from tokentape_api.telemetry import Telemetry
from tokentape_contracts import limits
from tokentape_contracts.errors import SessionNotFound
from tokentape_contracts.events import OPENED_ID, TurnRecorded
from tokentape_core.domain.state import SessionState, apply, fold, turn_id
from tokentape_core.store import Store


class Sessions:
    """Reads sessions through a bounded cache.

    Args:
        store: where the streams are.
        telemetry: counts the lookups and shows the size.
        cache_bytes: the bound; the least recently used sessions go first.
    """

    def __init__(
        self, store: Store, telemetry: Telemetry, *, cache_bytes: int = limits.SESSION_CACHE_BYTES
    ) -> None:
        self._store = store
        self._lookups = telemetry.cache_lookups
        self._cache_bytes = cache_bytes
        self._states: OrderedDict[str, tuple[SessionState, int]] = OrderedDict()
        self._bytes = 0
        telemetry.cache_sessions.set_function(lambda: len(self._states))
        telemetry.cache_bytes.set_function(lambda: self._bytes)

    async def load(self, session_id: str) -> SessionState:
        """The session as of now: one small read if it was seen before.

        Raises:
            SessionNotFound: there is no such session.
        """
        if len(session_id) > limits.SESSION_ID_CHARS:
            raise SessionNotFound("there is no such session")
        known = self._get(session_id)
        self._lookups["hit" if known else "miss"].inc()
        entries = await self._store.read(session_id, after=known.last_id if known else None)
        state = fold(entries, known)
        if state is None:
            raise SessionNotFound("there is no such session")
        if state is not known:
            self._put(session_id, state)
        return state

    async def tenant(self, session_id: str) -> str | None:
        """Whose session it is; None if there is no such session. No read if it was seen before."""
        if (known := self._get(session_id)) is not None:
            return known.opened.tenant
        if len(session_id) > limits.SESSION_ID_CHARS:
            return None
        entries = await self._store.read(session_id, until=OPENED_ID)
        state = fold(entries, None)
        return None if state is None else state.opened.tenant

    def appended(self, session_id: str, state: SessionState, seq: int, event: TurnRecorded) -> None:
        """Notes a turn that this process has just appended, if it follows the state that it knows."""
        if seq == len(state.turns) + 1:
            self._put(session_id, apply(state, turn_id(seq), event))

    def forget(self, session_id: str) -> None:
        """Drops a session that the store no longer has."""
        _, size = self._states.pop(session_id, (None, 0))
        self._bytes -= size

    def _get(self, session_id: str) -> SessionState | None:
        if session_id not in self._states:
            return None
        self._states.move_to_end(session_id)
        return self._states[session_id][0]

    def _put(self, session_id: str, state: SessionState) -> None:
        known, size = self._states.get(session_id, (None, 0))
        if known is not None and _age(known) >= _age(state):
            return
        since = len(known.turns) if known is not None else 0
        grown = sum(_size(turn.event) for turn in state.turns[since:])
        self._states[session_id] = (state, size + grown)
        self._states.move_to_end(session_id)
        self._bytes += grown
        while self._bytes > self._cache_bytes and len(self._states) > 1:
            _, (_, freed) = self._states.popitem(last=False)
            self._bytes -= freed


def _age(state: SessionState) -> tuple[int, bool]:
    return len(state.turns), state.sealed is not None


def _size(event: TurnRecorded) -> int:
    """Roughly the bytes that a turn holds in memory; its JSON objects are taken at twice their text."""
    arrays = event.suffix.nbytes + event.output.nbytes + event.logprobs.nbytes
    text = len(orjson.dumps([event.messages, event.tools]))
    return 2048 + arrays + 2 * text
