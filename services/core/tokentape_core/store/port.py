"""The port to the event store."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

from tokentape_contracts.events import Event, SessionOpened, SessionSealed, TurnRecorded
from tokentape_core.recording import Recording

Entry = tuple[str, Event]
"""A stream entry: its id and its event."""

NO_BLOBS: Final[Mapping[str, bytes]] = MappingProxyType({})


class SeqTaken(Exception):
    """Another writer's turn holds this seq; read the stream and append under the next one."""


class SessionExists(Exception):
    """A session of this id is there, with other content; nothing was changed."""


class Store(Protocol):
    """An append-only stream of events per session.

    Implementations guarantee INV-3: of two writers of one seq exactly one succeeds, and nothing follows the
    seal. Every append is safe to repeat with the same event: an event that is already there, recognised by
    its uuid, is success. All methods raise `StoreUnavailable` when the store cannot be reached.
    """

    async def open(self, session_id: str, event: SessionOpened) -> None:
        """Begins a session under an id that was never used before.

        Raises:
            TooManySessions: its tenant has `limits.SESSIONS_PER_TENANT` open ones already.
        """

    async def append(
        self, session_id: str, seq: int, event: TurnRecorded, blobs: Mapping[str, bytes] = NO_BLOBS
    ) -> None:
        """Appends turn number `seq`, and with it the bytes of its routing replay rows: both or nothing.

        Args:
            blobs: kind → bytes, for each kind of `event.replay`.

        Raises:
            SeqTaken: another turn holds that seq.
            SessionDeleted: the session is sealed, and this event is not in it.
            SessionNotFound: there is no such session.
        """

    async def seal(self, session_id: str, event: SessionSealed) -> None:
        """Ends the session; success also if it was ended before.

        Raises:
            SessionNotFound: there is no such session.
        """

    async def read(
        self, session_id: str, *, after: str | None = None, until: str | None = None
    ) -> list[Entry]:
        """The entries with ids above `after` and up to `until`, in order; none for an unknown session."""

    async def read_blobs(
        self, session_id: str, wanted: Sequence[tuple[TurnRecorded, str]]
    ) -> dict[tuple[str, str], bytes]:
        """`(event id, kind)` → bytes, of the routing replay rows of these events and kinds.

        Raises:
            StreamCorrupt: bytes that an event refers to are gone.
        """

    async def tail(self, session_id: str) -> str | None:
        """The id of the last entry; None for an unknown session."""

    async def export(self, session_id: str) -> Recording | None:
        """All that is kept of a session, as it is; None for an unknown one."""

    async def restore(self, recording: Recording) -> bool:
        """Writes a session that came from elsewhere, all or nothing; it stays for the retention.

        Nothing is checked: that is for `ensure_whole`. False if it was there already.

        Raises:
            SessionExists: its id is there with other content.
        """

    async def ready(self) -> None:
        """Returns if the store answers and can do what it must."""

    async def close(self) -> None:
        """Closes the connections."""
