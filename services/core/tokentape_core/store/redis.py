"""The store on Redis streams.

The explicit entry id is the concurrency control: XADD refuses an id that is not above the stream's top, so of
two writers of one seq only one wins, with no lock and no script. The seal has the greatest possible id, after
which Redis itself refuses every append.
"""

import asyncio
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.exceptions import (
    AuthenticationError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    WatchError,
)

from tokentape_contracts import keys, limits
from tokentape_contracts.errors import (
    EventUnsupported,
    SessionDeleted,
    SessionNotFound,
    StoreUnavailable,
    StreamCorrupt,
    TooManySessions,
    text_of,
)
from tokentape_contracts.events import (
    OPENED_ID,
    SEALED_ID,
    Event,
    SessionOpened,
    SessionSealed,
    TurnRecorded,
    decode,
    encode,
)
from tokentape_core.domain.state import turn_id
from tokentape_core.recording import Recording, part_names
from tokentape_core.store.pool import NodePipeline
from tokentape_core.store.port import NO_BLOBS, Entry, SeqTaken, SessionExists

_REFUSED: Final = ("equal or smaller than the target stream top item", "exhausted the last possible ID")
_UNABLE: Final = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN")
_UNABLE_CLASSES: Final[Mapping[type[ResponseError], str]] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    NoPermissionError: "NOPERM",
}
"""The same, where redis-py makes a class of the code and leaves it out of the text."""

_SENT: Final = re.compile(
    r"Command # \d+ \(.*\) of pipeline caused error: \(['\"]|['\"],\)$|, with args beginning with: .*",
    re.DOTALL,
)
"""What an error quotes of what was sent: redis-py does in a pipeline, and a server that lacks the command."""

_INLINE_ENTRIES: Final = 32
"""A read of more, or of more bytes, is decoded in a thread: it delays nobody else on the event loop."""
_INLINE_BYTES: Final = 256 * 1024

_PARTS_PER_READ: Final = 16
_RESTORE_TRIES: Final = 5


@contextmanager
def redis_errors() -> Iterator[None]:
    """Maps what Redis raises to `StoreUnavailable`: the one border where foreign errors become ours.

    What it does not map is a defect, a `ResponseError`. Neither that nor any cause shows what was sent, hence
    the conversation.
    """
    try:
        yield
    except ResponseError as error:
        if (refusal := _refusal(error)) is not None:
            raise StoreUnavailable(f"Redis refuses the command: {refusal}") from None
        raise ResponseError(_reason(error)).with_traceback(error.__traceback__) from None
    except AuthenticationError as error:
        raise StoreUnavailable(f"Redis refuses the login: {_reason(error)}") from None
    except (RedisError, OSError) as error:
        raise StoreUnavailable(f"Redis cannot be reached: {_reason(error)}") from None


def _refusal(error: ResponseError) -> str | None:
    """Why a server does not do what it could do, which is for the operator to mend; None for other errors."""
    reason = _reason(error)
    if (code := _UNABLE_CLASSES.get(type(error))) is not None:
        return f"{code} {reason}"
    return reason if reason.startswith(_UNABLE) else None


def _reason(error: Exception) -> str:
    return _SENT.sub("", text_of(error))


class RedisStore:
    """The port on a Redis-protocol server; any number of processes may use the same one.

    Args:
        client: from `connect`.
        idle_s: an open session's stream expires when nothing was appended for so long.
        retention_s: a session that this process seals or restores stays for so long; no less than `idle_s`,
            by which a turn that is refused after the seal may put its end off.
        wait_replicas: so many replicas must have an event before it counts as written; only with a client
            from `connect`.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        idle_s: int = limits.SESSION_IDLE_S,
        retention_s: int = limits.RETENTION_S,
        wait_replicas: int = 0,
    ) -> None:
        self._client = client
        self._wait_replicas = wait_replicas
        self._idle_s = idle_s
        self._retention_s = retention_s

    async def open(self, session_id: str, event: SessionOpened) -> None:
        await self._count(session_id, event.tenant)
        while await self._add(session_id, OPENED_ID, event) == "refused":
            holder = await self._uuid_at(session_id, OPENED_ID)
            if holder == event.id:
                return
            if holder is not None:  # else a failover has lost it just now
                raise SeqTaken(f"session {session_id} exists")

    async def append(
        self, session_id: str, seq: int, event: TurnRecorded, blobs: Mapping[str, bytes] = NO_BLOBS
    ) -> None:
        entry_id = turn_id(seq)
        outcome = await self._add(session_id, entry_id, event, blobs)
        if outcome == "missing":
            raise SessionNotFound("there is no such session")
        if outcome == "refused":
            holder = await self._uuid_at(session_id, entry_id)
            if holder == event.id:
                return
            top = await self.tail(session_id)
            if top is None:  # it expired just now
                raise SessionNotFound("there is no such session")
            if top == SEALED_ID:
                raise SessionDeleted("the session was deleted")
            if holder is not None:
                raise SeqTaken(f"turn {seq} exists")
            if int(top.partition("-")[0]) > seq:
                raise StreamCorrupt(f"the stream goes on beyond {entry_id}, which it does not hold")
            await self.append(session_id, seq, event, blobs)  # a failover has lost it just now

    async def seal(self, session_id: str, event: SessionSealed) -> None:
        # Before the seal: a session that is sealed and not in the index would never be archived.
        tenant = await self._index(session_id)
        if await self._add(session_id, SEALED_ID, event) == "missing":
            with redis_errors():
                await self._client.zrem(keys.SEALED, session_id)
            raise SessionNotFound("there is no such session")
        if tenant is not None:
            with redis_errors():
                await self._client.zrem(keys.tenant(tenant), session_id)

    async def read(
        self, session_id: str, *, after: str | None = None, until: str | None = None
    ) -> list[Entry]:
        if after == SEALED_ID:
            return []
        first = f"({after}" if after is not None else "-"
        with redis_errors():
            rows = await self._client.xrange(keys.events(session_id), min=first, max=until or "+")
        if len(rows) > _INLINE_ENTRIES or sum(map(_bytes_of, rows)) > _INLINE_BYTES:
            return await asyncio.to_thread(_entries, rows)
        return _entries(rows)

    async def read_blobs(
        self, session_id: str, wanted: Sequence[tuple[TurnRecorded, str]]
    ) -> dict[tuple[str, str], bytes]:
        key = keys.blobs(session_id)
        names = {(event.id, kind): part_names(event, kind) for event, kind in wanted}
        flat = [name for parts in names.values() for name in parts]
        found: dict[str, bytes | None] = {}
        with redis_errors():
            for start in range(0, len(flat), _PARTS_PER_READ):
                some = flat[start : start + _PARTS_PER_READ]
                values = await self._client.hmget(key, some)  # type: ignore[misc]
                found.update(zip(some, values, strict=True))
        if gone := sorted(name for name, data in found.items() if data is None):
            raise StreamCorrupt(f"routing replay rows are gone: {gone[0]}, and {len(gone) - 1} others")
        return {blob: b"".join(found[name] or b"" for name in parts) for blob, parts in names.items()}

    async def tail(self, session_id: str) -> str | None:
        with redis_errors():
            rows = await self._client.xrevrange(keys.events(session_id), count=1)
        return rows[0][0].decode() if rows else None

    async def export(self, session_id: str) -> Recording | None:
        blobs_key = keys.blobs(session_id)
        blobs: dict[str, bytes] = {}
        with redis_errors():
            # In this order: an audit entry names events that are there, and these name blobs that are.
            audit = await self._client.xrange(keys.audit(session_id))
            events = await self._client.xrange(keys.events(session_id))
            names = sorted(await self._client.hkeys(blobs_key))  # type: ignore[misc]
            for start in range(0, len(names), _PARTS_PER_READ):
                some = names[start : start + _PARTS_PER_READ]
                values = await self._client.hmget(blobs_key, some)  # type: ignore[misc]
                blobs.update((name.decode("latin-1"), data) for name, data in zip(some, values, strict=True))
        if not events or None in blobs.values() or await self.tail(session_id) is None:  # it may have expired
            return None
        return Recording(session_id, _raw(events), blobs, _raw(audit))

    async def restore(self, recording: Recording) -> bool:
        sid = recording.session_id
        watched = [keys.events(sid), keys.blobs(sid), keys.audit(sid)]
        with redis_errors():
            async with self._client.pipeline(transaction=True) as pipe:
                for _ in range(_RESTORE_TRIES):
                    try:
                        await pipe.watch(*watched)
                        there = await self.export(sid)
                        if there is not None:
                            if not there.contains(recording):
                                raise SessionExists(f"session {sid} is there already, with other content")
                            return False
                        self._write(pipe, recording)
                        await pipe.execute()
                        return True
                    except WatchError:  # another writer, or a lost connection: look again
                        continue
        raise StoreUnavailable(f"session {sid} could not be written: others write to it")

    def _write(self, pipe: Pipeline, recording: Recording) -> None:
        """The transaction that writes a session. What an expired one left over is replaced."""
        sid = recording.session_id
        pipe.multi()  # type: ignore[no-untyped-call]
        pipe.delete(keys.blobs(sid), keys.audit(sid))
        for key, entries in ((keys.events(sid), recording.events), (keys.audit(sid), recording.audit)):
            for entry_id, fields in entries:
                pipe.xadd(key, dict[Any, Any](fields), id=entry_id)
        for name, data in recording.blobs.items():
            pipe.hset(keys.blobs(sid), name.encode("latin-1"), data)  # type: ignore[arg-type]
        for key in (keys.events(sid), keys.blobs(sid), keys.audit(sid)):
            pipe.expire(key, self._retention_s)

    async def ready(self) -> None:
        with redis_errors():
            try:
                await self._client.expire(keys.events("ready"), 1, gt=True)
            except ResponseError as error:
                if _refusal(error) is not None:
                    raise
                raise StoreUnavailable(f"Redis 7.0 or newer is needed: EXPIRE … GT fails: {error}") from error

    async def close(self) -> None:
        await self._client.aclose()

    async def _count(self, session_id: str, tenant: str) -> None:
        """Counts a session that is about to be opened among its tenant's, or raises `TooManySessions`.

        First it counts and then it looks, so that openings at the same time cannot pass the limit together.
        It counts for as long as an idle session lives: one whose opener died frees its place by itself, and
        so does one that is used for longer.
        """
        key, now = keys.tenant(tenant), time.time()
        pipe = self._client.pipeline(transaction=True)
        pipe.zremrangebyscore(key, "-inf", now)
        pipe.zadd(key, {session_id: now + self._idle_s})
        pipe.zcard(key)
        pipe.expire(key, self._idle_s)
        with redis_errors():
            _, _, count, _ = await pipe.execute()
            if count > limits.SESSIONS_PER_TENANT:
                await self._client.zrem(key, session_id)
                raise TooManySessions(
                    f"{limits.SESSIONS_PER_TENANT} sessions are open; delete those that have ended"
                )

    async def _index(self, session_id: str) -> str | None:
        """Adds a session to those that are to be archived, and says whose it is.

        Without an archive nobody takes them out again. What is older than twice the retention goes: the
        sessions were gone after one, and a worker had another to say so. It is never less than twice the
        default: the retention may have been longer.
        """
        now = time.time()
        pipe = self._client.pipeline(transaction=False)
        pipe.zadd(keys.SEALED, {session_id: now}, nx=True)
        pipe.zremrangebyscore(keys.SEALED, "-inf", now - 2 * max(self._retention_s, limits.RETENTION_S))
        events = keys.events(session_id)  # may lie on another node than the index
        with redis_errors():
            _, rows = await asyncio.gather(
                pipe.execute(), self._client.xrange(events, min=OPENED_ID, max=OPENED_ID)
            )
        try:
            opened = decode(rows[0][1]) if rows else None
        except (EventUnsupported, StreamCorrupt):  # can be ended all the same
            return None
        return opened.tenant if isinstance(opened, SessionOpened) else None

    async def _uuid_at(self, session_id: str, entry_id: str) -> str | None:
        """Whose entry this is, as it stands on a server and on the replicas that must have it.

        Redis waits until replicas have what the connection has written. Here that may be nothing, as XADD was
        refused: hence a write, together with the look. Apart from it, the wait could be for another server's
        replicas, after a failover.
        """
        pipe = self._pipeline(transaction=self._wait_replicas > 0)
        pipe.xrange(keys.events(session_id), min=entry_id, max=entry_id)
        if self._wait_replicas:
            pipe.set(keys.replicated(session_id), b"", px=1)
        with redis_errors():
            rows, *_ = await pipe.execute()
        return decode(rows[0][1]).id if rows else None

    def _pipeline(self, *, transaction: bool) -> Pipeline:
        """A pipeline that ends when the replicas have what it wrote."""
        pipe = self._client.pipeline(transaction=transaction)
        if isinstance(pipe, NodePipeline):
            pipe.replicas = self._wait_replicas
        return pipe

    async def _add(
        self, session_id: str, entry_id: str, event: Event, blobs: Mapping[str, bytes] = NO_BLOBS
    ) -> Literal["added", "missing", "refused"]:
        """One XADD, sent again on a lost connection; "refused" may then mean one's own earlier success.

        The time to live is set in the same round trip. A turn never shortens it (`GT`): one that comes late
        must not cut the retention of a sealed stream. Blobs are written in the same transaction; those of a
        refused event are named by no entry and expire with the session.
        """
        key, blobs_key = keys.events(session_id), keys.blobs(session_id)
        fields: dict[Any, Any] = dict(encode(event))
        is_turn = isinstance(event, TurnRecorded)
        ttl_s = self._retention_s if isinstance(event, SessionSealed) else self._idle_s
        pipe = self._pipeline(transaction=not is_turn or bool(blobs))
        pipe.xadd(key, fields, id=entry_id, nomkstream=not isinstance(event, SessionOpened))
        pipe.expire(key, ttl_s, gt=is_turn)
        for kind, data in blobs.items():
            for part, piece in enumerate(_parts(data)):
                pipe.hset(blobs_key, keys.blob_part(event.id, kind, part), piece)  # type: ignore[arg-type]
        if blobs:
            pipe.expire(blobs_key, ttl_s, nx=True)
        if not isinstance(event, SessionOpened):
            pipe.expire(blobs_key, ttl_s, gt=is_turn)
        if isinstance(event, SessionSealed):
            pipe.expire(keys.audit(session_id), ttl_s)
        with redis_errors():
            added, *rest = await pipe.execute(raise_on_error=False)
            if isinstance(added, ResponseError) and any(text in str(added) for text in _REFUSED):
                return "refused"
            for outcome in (added, *rest):
                if isinstance(outcome, Exception):
                    raise outcome
        return "missing" if added is None else "added"


def _parts(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for start in range(0, len(view), limits.STORE_VALUE_BYTES):
        yield view[start : start + limits.STORE_VALUE_BYTES]


def _raw(rows: list[tuple[bytes, dict[bytes, bytes]]]) -> list[tuple[str, dict[bytes, bytes]]]:
    return [(entry_id.decode(), fields) for entry_id, fields in rows]


def _bytes_of(row: tuple[bytes, dict[bytes, bytes]]) -> int:
    return sum(map(len, row[1].values()))


def _entries(rows: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Entry]:
    return [(entry_id.decode(), decode(fields)) for entry_id, fields in rows]
