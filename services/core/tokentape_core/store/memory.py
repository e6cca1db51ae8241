"""The store in memory: for tests, and as the plainest statement of the port's rules."""

from tokentape_contracts.errors import SessionDeleted, SessionNotFound, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Event, SessionOpened, SessionSealed, TurnRecorded
from tokentape_core.domain.state import turn_id
from tokentape_core.store.port import Entry, SeqTaken


class MemoryStore:
    """Keeps streams in a dictionary; lives as long as the process."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Event]] = {}

    async def open(self, session_id: str, event: SessionOpened) -> None:
        stream = self._streams.setdefault(session_id, {})
        if stream.setdefault(OPENED_ID, event).id != event.id:
            raise SeqTaken(f"session {session_id} exists")

    async def append(self, session_id: str, seq: int, event: TurnRecorded) -> None:
        stream = self._stream(session_id)
        entry_id = turn_id(seq)
        if entry_id in stream and stream[entry_id].id == event.id:
            return
        if SEALED_ID in stream:
            raise SessionDeleted("the session was deleted")
        if entry_id in stream:
            raise SeqTaken(f"turn {seq} exists")
        if _order(entry_id) < _order(next(reversed(stream))):
            raise StreamCorrupt(f"the stream goes on beyond {entry_id}, which it does not hold")
        stream[entry_id] = event

    async def seal(self, session_id: str, event: SessionSealed) -> None:
        self._stream(session_id).setdefault(SEALED_ID, event)

    async def read(
        self, session_id: str, *, after: str | None = None, until: str | None = None
    ) -> list[Entry]:
        return [
            (entry_id, event)
            for entry_id, event in self._streams.get(session_id, {}).items()
            if (after is None or _order(entry_id) > _order(after))
            and (until is None or _order(entry_id) <= _order(until))
        ]

    async def tail(self, session_id: str) -> str | None:
        return next(reversed(self._streams.get(session_id, {})), None)

    async def ready(self) -> None:
        return

    async def close(self) -> None:
        return

    def _stream(self, session_id: str) -> dict[str, Event]:
        try:
            return self._streams[session_id]
        except KeyError:
            raise SessionNotFound("there is no such session") from None


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
