"""The store in memory: for tests, for sessions of a file, and as the plainest form of the port's rules."""

from collections.abc import Mapping, Sequence

from tokentape_contracts import keys, limits
from tokentape_contracts.errors import SessionDeleted, SessionNotFound, StreamCorrupt, TooManySessions
from tokentape_contracts.events import (
    OPENED_ID,
    SEALED_ID,
    Fields,
    SessionOpened,
    SessionSealed,
    TurnRecorded,
    decode,
    encode,
)
from tokentape_core.domain.state import turn_id
from tokentape_core.recording import RawEntry, Recording, part_names
from tokentape_core.store.port import NO_BLOBS, Entry, SeqTaken, SessionExists


class MemoryStore:
    """Keeps the bytes of streams in dictionaries; lives as long as the process."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Fields]] = {}
        self._blobs: dict[str, dict[str, bytes]] = {}
        self._audits: dict[str, list[RawEntry]] = {}
        self._open: dict[str, str] = {}
        """Open session → tenant."""

    async def open(self, session_id: str, event: SessionOpened) -> None:
        if session_id not in self._streams:
            if list(self._open.values()).count(event.tenant) >= limits.SESSIONS_PER_TENANT:
                raise TooManySessions(
                    f"{limits.SESSIONS_PER_TENANT} sessions are open; delete those that have ended"
                )
            self._open[session_id] = event.tenant
        stream = self._streams.setdefault(session_id, {OPENED_ID: encode(event)})
        if decode(stream[OPENED_ID]).id != event.id:
            raise SeqTaken(f"session {session_id} exists")

    async def append(
        self, session_id: str, seq: int, event: TurnRecorded, blobs: Mapping[str, bytes] = NO_BLOBS
    ) -> None:
        stream = self._stream(session_id)
        entry_id = turn_id(seq)
        if entry_id in stream and decode(stream[entry_id]).id == event.id:
            return
        if SEALED_ID in stream:
            raise SessionDeleted("the session was deleted")
        if entry_id in stream:
            raise SeqTaken(f"turn {seq} exists")
        if _order(entry_id) < _order(next(reversed(stream))):
            raise StreamCorrupt(f"the stream goes on beyond {entry_id}, which it does not hold")
        stream[entry_id] = encode(event)
        stored = self._blobs.setdefault(session_id, {})
        for kind, data in blobs.items():
            for part, start in enumerate(range(0, len(data), limits.STORE_VALUE_BYTES)):
                piece = data[start : start + limits.STORE_VALUE_BYTES]
                stored[keys.blob_part(event.id, kind, part)] = piece

    async def seal(self, session_id: str, event: SessionSealed) -> None:
        self._stream(session_id).setdefault(SEALED_ID, encode(event))
        self._open.pop(session_id, None)

    async def read(
        self, session_id: str, *, after: str | None = None, until: str | None = None
    ) -> list[Entry]:
        return [
            (entry_id, decode(fields))
            for entry_id, fields in self._streams.get(session_id, {}).items()
            if (after is None or _order(entry_id) > _order(after))
            and (until is None or _order(entry_id) <= _order(until))
        ]

    async def read_blobs(
        self, session_id: str, wanted: Sequence[tuple[TurnRecorded, str]]
    ) -> dict[tuple[str, str], bytes]:
        stored = self._blobs.get(session_id, {})
        try:
            return {
                (event.id, kind): b"".join(stored[name] for name in part_names(event, kind))
                for event, kind in wanted
            }
        except KeyError as error:
            raise StreamCorrupt(f"the routing replay rows {error} are gone") from None

    async def tail(self, session_id: str) -> str | None:
        return next(reversed(self._streams.get(session_id, {})), None)

    async def export(self, session_id: str) -> Recording | None:
        if session_id not in self._streams:
            return None
        return Recording(
            session_id,
            list(self._streams[session_id].items()),
            dict(self._blobs.get(session_id, {})),
            list(self._audits.get(session_id, [])),
        )

    async def restore(self, recording: Recording) -> bool:
        there = await self.export(recording.session_id)
        if there is None:
            self._streams[recording.session_id] = dict(recording.events)
            self._blobs[recording.session_id] = dict(recording.blobs)
            self._audits[recording.session_id] = list(recording.audit)
        elif not there.contains(recording):
            raise SessionExists(f"session {recording.session_id} is there already, with other content")
        return there is None

    async def ready(self) -> None:
        return

    async def close(self) -> None:
        return

    def _stream(self, session_id: str) -> dict[str, Fields]:
        try:
            return self._streams[session_id]
        except KeyError:
            raise SessionNotFound("there is no such session") from None


def _order(entry_id: str) -> tuple[int, ...]:
    return tuple(map(int, entry_id.split("-")))
