"""The port to the event store."""

from typing import Protocol

from tokentape_contracts.events import Event, SessionOpened, SessionSealed, TurnRecorded

Entry = tuple[str, Event]
"""A stream entry: its id and its event."""


class SeqTaken(Exception):
    """Another writer's turn holds this seq; read the stream and append under the next one."""


class Store(Protocol):
    """An append-only stream of events per session.

    Implementations guarantee INV-3: of two writers of one seq exactly one succeeds, and nothing follows the
    seal. Every append is safe to repeat with the same event: an event that is already there, recognised by
    its uuid, is success. All methods raise `StoreUnavailable` when the store cannot be reached.
    """

    async def open(self, session_id: str, event: SessionOpened) -> None:
        """Begins a session under an id that was never used before."""

    async def append(self, session_id: str, seq: int, event: TurnRecorded) -> None:
        """Appends turn number `seq`.

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

    async def tail(self, session_id: str) -> str | None:
        """The id of the last entry; None for an unknown session."""

    async def ready(self) -> None:
        """Returns if the store answers and can do what it must."""

    async def close(self) -> None:
        """Closes the connections."""
