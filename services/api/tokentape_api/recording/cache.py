"""Folded sessions that this process has seen.

A cache and nothing else: a session's truth is its stream, and every use reads what is newer there first. So
any API process serves any session at any moment (INV-4); one that has never seen it pays one full read.
"""

import sys
from collections import OrderedDict
from typing import Final

from tokentape_api.telemetry import Telemetry
from tokentape_contracts import limits
from tokentape_contracts.errors import SessionNotFound
from tokentape_contracts.events import OPENED_ID, TurnRecorded
from tokentape_core.domain.state import SessionState, apply, fold, turn_id
from tokentape_core.store import Store

_PLACE: Final = 200
"""What a session's place in the cache takes: of an ordered dictionary."""


class Sessions:
    """Reads sessions through a bounded cache.

    Args:
        store: where the streams are.
        telemetry: counts the lookups and shows the size.
        cache_bytes: the bound, on what the sessions take in memory; those that no turn may follow any more,
            and those without turns, go first, then the least recently used.
    """

    def __init__(
        self, store: Store, telemetry: Telemetry, *, cache_bytes: int = limits.SESSION_CACHE_BYTES
    ) -> None:
        self._store = store
        self._lookups = telemetry.cache_lookups
        self._cache_bytes = cache_bytes
        self._live: OrderedDict[str, SessionState] = OrderedDict()
        self._idle: OrderedDict[str, SessionState] = OrderedDict()
        """Sessions that are sealed or have no turns."""
        self._bytes = 0
        telemetry.cache_sessions.set_function(lambda: len(self._live) + len(self._idle))
        telemetry.cache_bytes.set_function(lambda: self._bytes)

    async def load(self, session_id: str, *, is_shown: bool = False) -> SessionState:
        """The session as of now: one small read if it was seen before.

        Args:
            is_shown: one more read makes sure that the store still has what was seen before. Whoever appends
                a turn learns it from the store.

        Raises:
            SessionNotFound: there is no such session.
        """
        if len(session_id) > limits.SESSION_ID_CHARS:
            raise SessionNotFound("there is no such session")
        known = self._get(session_id)
        self._lookups["hit" if known else "miss"].inc()
        entries = await self._store.read(session_id, after=known.last_id if known else None)
        state = fold(entries, known)
        if is_shown and state is known and await self._store.tail(session_id) is None:
            self.forget(session_id)
            state = None
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
        for states in (self._idle, self._live):
            if (state := states.pop(session_id, None)) is not None:
                self._bytes -= _held(session_id, state)

    def _get(self, session_id: str) -> SessionState | None:
        for states in (self._live, self._idle):
            if session_id in states:
                states.move_to_end(session_id)
                return states[session_id]
        return None

    def _put(self, session_id: str, state: SessionState) -> None:
        known = self._get(session_id)
        if known is not None and _age(known) >= _age(state):
            return
        self.forget(session_id)
        is_idle = state.sealed is not None or not state.turns
        (self._idle if is_idle else self._live)[session_id] = state
        self._bytes += _held(session_id, state)
        while self._bytes > self._cache_bytes and len(self._live) + len(self._idle) > 1:
            self.forget(next(iter(self._idle or self._live)))


def _age(state: SessionState) -> tuple[int, bool]:
    return len(state.turns), state.sealed is not None


def _held(session_id: str, state: SessionState) -> int:
    """Bytes that a session takes in the cache, its own id and place included."""
    return state.size + sys.getsizeof(session_id) + _PLACE
