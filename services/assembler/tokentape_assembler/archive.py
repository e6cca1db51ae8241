"""The archive: sealed sessions are copied to any file system that fsspec knows, before Redis forgets them.

Whoever seals a session adds it to `keys.SEALED`, before the seal. Each worker process looks there now and
then, takes sessions one after the other under a short lease, writes the file of each (`recording`), and only
then takes it out. A worker that dies in between, or two that race, write the same file again.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable
from threading import Thread
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from tokentape_contracts import keys, limits
from tokentape_contracts.errors import StoreUnavailable, text_of
from tokentape_contracts.events import SEALED_ID
from tokentape_core.recording import SUFFIX, Recording, dump
from tokentape_core.store import RedisStore, redis_errors

T = TypeVar("T")

_SESSION_ID: Final = re.compile(rb"[\w-]{1,%d}" % limits.SESSION_ID_CHARS)

log = logging.getLogger("tokentape.assembler")


class ArchiveError(Exception):
    """The archive cannot be opened, or does not take a session at the moment; says why."""


class Archive:
    """A directory of such files, `<session id>.tokentape`. Its methods block.

    Args:
        url: what fsspec understands, for example `file:///data/sessions` or `s3://bucket/sessions`.

    Raises:
        ArchiveError: fsspec, or its package for this kind of URL, is not installed or refuses the URL.
    """

    def __init__(self, url: str) -> None:
        # Not by a parser of URLs: fsspec's may be chained (`simplecache::s3://…`).
        user, _, password = url.partition("://")[2].rpartition("@")[0].partition(":")
        secret = password or user  # a token stands alone
        self._secrets = {secret, unquote(secret)} - {""}
        try:
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(url)
        except Exception as error:  # whatever a file system raises when it is set up
            raise ArchiveError(f"archive-url cannot be used: {self.shown(error)}") from None
        self._root: Final = root.rstrip("/")

    def shown(self, error: Exception) -> str:
        """What a file system raised, without the credentials of the URL, which some of them quote."""
        text = f"{type(error).__name__}: {error}"
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def path(self, session_id: str) -> str:
        """Where the file of a session is, within the file system."""
        return f"{self._root}/{session_id}{SUFFIX}"

    def has(self, session_id: str) -> bool:
        """Whether the session is archived."""
        return bool(self._files.exists(self.path(session_id)))

    def write(self, recording: Recording) -> None:
        """Writes a session's file; one that is there is replaced.

        Under a name of its own first: nobody finds half a file, where the file system can move one.
        """
        data, path = dump([recording]), self.path(recording.session_id)
        part = f"{path}.{uuid.uuid4().hex}.part"
        self._files.makedirs(self._root, exist_ok=True)
        try:
            self._files.pipe_file(part, data)
            self._files.mv(part, path)
        except NotImplementedError:
            self._files.pipe_file(path, data)
        finally:
            with contextlib.suppress(Exception):
                if self._files.exists(part):
                    self._files.rm_file(part)


class Archiver:
    """Copies sealed sessions into the archive, a few at a time. Any number may do it at once.

    Args:
        refused: hears of each entry of the index that names no session which can be read.
        after_s: how long after its seal a session is copied.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        archive: Archive,
        refused: Callable[[], object] = lambda: None,
        *,
        after_s: float = limits.ARCHIVE_AFTER_S,
    ) -> None:
        self._client = client
        self._store = RedisStore(client)
        self._archive = archive
        self._refused = refused
        self._after_s = after_s
        self._is_busy = False

    async def run(self) -> None:
        """Archives until it is cancelled; nothing that Redis or the archive does ends it."""
        while True:
            await asyncio.sleep(limits.ARCHIVE_EVERY_S)
            try:
                await self.round()
            except StoreUnavailable as error:
                log.warning("archiving has to wait: %s", error.detail)
            except Exception:  # a defect of ours must not end it either
                log.exception("archiving failed")

    async def round(self) -> int:
        """Archives up to `limits.ARCHIVE_SESSIONS` sessions, the longest sealed first; how many it were.

        It ends with the first session that the archive does not take, as the next would fare no better.
        """
        if self._is_busy:  # a write hangs: not one more beside it
            return 0
        until = time.time() - self._after_s
        archived = 0
        with redis_errors():
            for entry in await self._client.zrangebyscore(
                keys.SEALED, "-inf", until, 0, limits.ARCHIVE_SESSIONS
            ):
                if not _SESSION_ID.fullmatch(entry):  # it would become a path
                    self._refuse(entry, "no session has such an id")
                    await self._client.zrem(keys.SEALED, entry)
                    continue
                session_id = entry.decode()
                try:
                    archived += await self._take(session_id)
                except ArchiveError as error:
                    log.warning("archive_failed session=%s; it is tried again: %s", session_id, error)
                    break
                except ResponseError as error:  # a key of the session is none of ours
                    self._refuse(entry, text_of(error))
                    await self._postpone(session_id)
        return archived

    def _refuse(self, entry: bytes, reason: str) -> None:
        log.error("entry_refused kind=sealed: %r: %s", entry[:100], reason)
        self._refused()

    async def _take(self, session_id: str) -> bool:
        lease = keys.archiving(session_id)
        if not await self._client.set(lease, b"1", nx=True, ex=limits.ARCHIVE_LEASE_S):
            return False
        try:
            if await self._client.zscore(keys.SEALED, session_id) is None:  # another worker was faster
                return False
            return await self._copy(session_id)
        except ArchiveError:
            await self._postpone(session_id)
            raise
        finally:
            with contextlib.suppress(RedisError, OSError):
                await self._client.delete(lease)

    async def _copy(self, session_id: str) -> bool:
        tail = await self._store.tail(session_id)
        if tail is not None and tail != SEALED_ID:  # the seal is on its way, or its writer died
            await self._postpone(session_id)
            return False
        recording = await self._store.export(session_id)
        if recording is not None:
            await self._in_thread(lambda: self._archive.write(recording))
            log.info("archived session=%s events=%d", session_id, len(recording.events))
        elif not await self._in_thread(lambda: self._archive.has(session_id)):
            log.error("archive_lost session=%s: its keys expired before it was archived", session_id)
        await self._client.zrem(keys.SEALED, session_id)
        return recording is not None

    async def _postpone(self, session_id: str) -> None:
        """Others come first. Never puts back what another worker took out."""
        sealed_at = time.time() - max(0.0, self._after_s - limits.ARCHIVE_RETRY_S)
        await self._client.zadd(keys.SEALED, {session_id: sealed_at}, xx=True)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """The result of blocking work, in a thread that cannot keep the process from ending.

        Raises:
            ArchiveError: whatever the work raised; or it took too long and goes on alone.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(set_it: Callable[[Any], None], value: Any) -> None:
            self._is_busy = False
            if not done.done():
                set_it(value)

        def target() -> None:
            try:
                outcome: tuple[Callable[[Any], None], Any] = (done.set_result, work())
            except Exception as error:
                outcome = (done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(settle, *outcome)

        self._is_busy = True
        Thread(target=target, name="archive", daemon=True).start()
        try:
            async with asyncio.timeout(limits.ARCHIVE_LEASE_S):
                return await done
        except Exception as error:
            raise ArchiveError(self._archive.shown(error)) from None
