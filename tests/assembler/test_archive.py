"""The archive of sealed sessions."""

import asyncio
import logging
import threading
import time
import traceback
import uuid
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from tests.assembler.support import Server, WorkerProcess, record, until
from tests.support.recordings import content, recording
from tests.support.sessions import sealed
from tokentape_assembler.archive import Archive, ArchiveError, Archiver
from tokentape_assembler.run import run
from tokentape_assembler.settings import AssemblerSettings
from tokentape_contracts import keys, limits
from tokentape_core.recording import load
from tokentape_core.store import RedisStore


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An archive that is not there yet, of each kind."""
    return (tmp_path / "a" / "b").as_uri() if request.param == "file" else f"memory://{uuid.uuid4().hex}/b"


@pytest.fixture
def archive(url: str) -> Archive:
    return Archive(url)


@pytest.fixture
def archiver(fake: redis.asyncio.Redis, archive: Archive) -> Archiver:
    return Archiver(fake, archive, after_s=0.0)


def names(archive: Archive) -> list[str]:
    """The files of an archive."""
    files, root = archive._files, archive._root
    return (
        sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False)) if files.exists(root) else []
    )


async def seal(client: redis.asyncio.Redis, *session_ids: str) -> None:
    store = RedisStore(client)
    for session_id in session_ids:
        await record(store, turns=3, sid=session_id)
        await store.seal(session_id, sealed())


async def index(client: redis.asyncio.Redis) -> list[str]:
    return [name.decode() for name in await client.zrange(keys.SEALED, 0, -1)]


async def test_sealed_sessions_are_archived(
    fake: redis.asyncio.Redis, archive: Archive, archiver: Archiver
) -> None:
    """Each is a file that holds the session to the byte; then it is out of the index, without a lease."""
    await seal(fake, "s1", "s2")
    assert await archiver.round() == 2
    assert names(archive) == ["s1.tokentape", "s2.tokentape"]
    [found] = load(archive._files.cat_file(archive.path("s1")))
    here = await RedisStore(fake).export("s1")
    assert here is not None
    assert content(found) == content(here)
    assert await index(fake) == []
    assert await fake.keys("*archiving*") == []
    assert await archiver.round() == 0


async def test_a_session_waits_for_its_last_collects(fake: redis.asyncio.Redis, archive: Archive) -> None:
    """A session that was sealed just now is left for later."""
    assert limits.COLLECT_DEADLINE_MAX_S + limits.ASSEMBLY_TIMEOUT_S < limits.ARCHIVE_AFTER_S
    assert limits.ARCHIVE_AFTER_S < limits.RETENTION_MIN_S / 3
    await seal(fake, "s1")
    assert await Archiver(fake, archive).round() == 0
    assert names(archive) == []
    await fake.zadd(keys.SEALED, {"s1": time.time() - limits.ARCHIVE_AFTER_S})
    assert await Archiver(fake, archive).round() == 1


async def test_a_round_is_bounded(
    fake: redis.asyncio.Redis, archiver: Archiver, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round takes so many sessions and no more, those that were sealed first."""
    monkeypatch.setattr(limits, "ARCHIVE_SESSIONS", 2)
    await seal(fake, "s1", "s2", "s3")
    assert await archiver.round() == 2
    assert await index(fake) == ["s3"]


async def test_entries_that_are_no_sessions(fake: redis.asyncio.Redis, archive: Archive) -> None:
    """They are counted and leave the index, or stand behind; the sessions after them are archived."""
    refused: list[str] = []
    archiver = Archiver(fake, archive, lambda: refused.append("one"), after_s=0.0)
    names_: list[Any] = [b"\xff", "../up", "", "a/b", "x" * 100, "taken"]
    await seal(fake, "good")
    before = time.time() - 100
    await fake.zadd(keys.SEALED, {name: before + place for place, name in enumerate(names_)})
    await fake.set(keys.events("taken"), "no stream")
    assert await archiver.round() == 1
    assert names(archive) == ["good.tokentape"]
    assert await index(fake) == ["taken"]
    assert len(refused) == len(names_)


async def test_a_worker_that_died_after_the_write(
    fake: redis.asyncio.Redis, archiver: Archiver, archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that is archived but still in the index is archived once more, with the same bytes."""
    await seal(fake, "s1")

    async def die(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        patch.setattr(fake, "zrem", die)
        with pytest.raises(asyncio.CancelledError):
            await archiver.round()
    before = archive._files.cat_file(archive.path("s1"))
    assert await index(fake) == ["s1"]
    assert await archiver.round() == 1
    assert archive._files.cat_file(archive.path("s1")) == before
    assert await index(fake) == []


async def test_the_lease_of_a_worker_that_died(fake: redis.asyncio.Redis, archiver: Archiver) -> None:
    """While another worker holds the lease a session is left alone; after it has expired it is taken."""
    await seal(fake, "s1")
    await fake.set(keys.archiving("s1"), b"1", px=150)
    assert await archiver.round() == 0
    await asyncio.sleep(0.2)
    assert await archiver.round() == 1


async def test_racing_workers(fake: redis.asyncio.Redis, url: str, archive: Archive) -> None:
    """Of workers that look at once each session is written by one."""
    await seal(fake, *(f"s{number}" for number in range(6)))
    archivers = [Archiver(fake, Archive(url), after_s=0.0) for _ in range(4)]
    assert sum(await asyncio.gather(*(each.round() for each in archivers))) == 6
    assert len(names(archive)) == 6
    assert await index(fake) == []


async def test_an_unsealed_session_is_left(
    fake: redis.asyncio.Redis, archiver: Archiver, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose seal has not come stays in the index, behind the others; once it is sealed it is archived."""
    await record(RedisStore(fake), turns=1, sid="open")
    await seal(fake, "s1")
    await fake.zadd(keys.SEALED, {"open": 1.0})
    assert await archiver.round() == 1
    assert await index(fake) == ["open"]
    assert await fake.zscore(keys.SEALED, "open") > time.time() - 60
    await RedisStore(fake).seal("open", sealed())
    assert await archiver.round() == 1
    assert "archive_lost" not in caplog.text


async def test_a_session_that_expired_is_lost(
    fake: redis.asyncio.Redis, archiver: Archiver, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    """It is dropped with an error, unless it had been archived before it expired."""
    await seal(fake, "s1", "s2")
    await archiver.round()
    await fake.zadd(keys.SEALED, {"s1": 1.0, "gone": 2.0})
    await fake.delete(keys.events("s1"))
    assert await archiver.round() == 0
    assert await index(fake) == []
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["archive_lost session=gone: its keys expired before it was archived"]


async def test_an_archive_that_fails(
    fake: redis.asyncio.Redis, archiver: Archiver, archive: Archive, caplog: pytest.LogCaptureFixture
) -> None:
    """What it does not take is logged and stays in the index; the round ends, and the next goes on."""
    await seal(fake, "s1", "s2")
    writes: list[str] = []
    write = archive.write

    def fail(recording: Any) -> None:
        writes.append(recording.session_id)
        raise PermissionError("read-only")

    archive.write = fail  # type: ignore[method-assign]
    assert await archiver.round() == 0
    assert await archiver.round() == 0
    assert writes == ["s1", "s2"]
    assert "archive_failed session=s1; it is tried again: PermissionError: read-only" in caplog.text
    assert await index(fake) == ["s1", "s2"]
    archive.write = write  # type: ignore[method-assign]
    assert await archiver.round() == 2


async def test_a_session_is_tried_again_soon(fake: redis.asyncio.Redis, archive: Archive) -> None:
    """What was not taken waits for `limits.ARCHIVE_RETRY_S`, not for as long as after its seal."""
    await seal(fake, "s1")
    await fake.zadd(keys.SEALED, {"s1": time.time() - limits.ARCHIVE_AFTER_S})
    archiver, write = Archiver(fake, archive), archive.write

    def fail(_: Any) -> None:
        raise PermissionError("read-only")

    archive.write = fail  # type: ignore[method-assign]
    assert await archiver.round() == 0
    archive.write = write  # type: ignore[method-assign]
    await fake.zincrby(keys.SEALED, 5 - limits.ARCHIVE_RETRY_S, "s1")
    assert await archiver.round() == 0
    await fake.zincrby(keys.SEALED, -5, "s1")
    assert await archiver.round() == 1


async def test_an_archive_that_hangs(
    fake: redis.asyncio.Redis,
    archiver: Archiver,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The worker gives up after the lease's time, begins nothing while the write hangs, and loses nothing."""
    monkeypatch.setattr(limits, "ARCHIVE_LEASE_S", 1)
    await seal(fake, "s1", "s2")
    may_go = threading.Event()
    write = archive.write
    archive.write = lambda recording: (may_go.wait(), write(recording))  # type: ignore[method-assign]
    assert await archiver.round() == 0
    assert "archive_failed session=s1" in caplog.text
    assert await archiver.round() == 0
    assert await index(fake) == ["s2", "s1"]
    may_go.set()
    await until(lambda: names(archive) == ["s1.tokentape"])
    await until(lambda: _round(archiver, fake))


async def _round(archiver: Archiver, client: redis.asyncio.Redis) -> bool:
    await archiver.round()
    return await index(client) == []


async def test_redis_is_away(
    fake: redis.asyncio.Redis,
    archive: Archive,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An outage of Redis, and a defect, are logged; the archiver goes on."""
    monkeypatch.setattr(limits, "ARCHIVE_EVERY_S", 0.001)
    archiver = Archiver(fake, archive, after_s=0.0)
    rounds = iter([ConnectionError("away"), KeyError("defect")])
    look = fake.zrangebyscore

    async def fail(*given: Any) -> Any:
        if (error := next(rounds, None)) is not None:
            raise error
        return await look(*given)

    monkeypatch.setattr(fake, "zrangebyscore", fail)
    await seal(fake, "s1")
    task = asyncio.create_task(archiver.run())
    await until(lambda: names(archive) == ["s1.tokentape"])
    task.cancel()
    await asyncio.wait({task})
    assert "archiving has to wait: Redis cannot be reached: away" in caplog.text
    assert "archiving failed" in caplog.text


def test_half_a_file_is_never_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails leaves neither the file nor a part of it; an older file stays."""
    archive = Archive(tmp_path.as_uri())
    archive.write(recording("s1", 1))
    before = archive._files.cat_file(archive.path("s1"))

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(LocalFileSystem, "mv", fail)
    with pytest.raises(OSError, match="disk full"):
        archive.write(recording("s1", 2))
    assert names(archive) == ["s1.tokentape"]
    assert archive._files.cat_file(archive.path("s1")) == before


def test_a_file_system_that_cannot_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """There the file is written under its own name at once."""

    def fail(*_: object, **__: object) -> None:
        raise NotImplementedError

    archive = Archive(f"memory://{uuid.uuid4().hex}")
    monkeypatch.setattr(MemoryFileSystem, "mv", fail)
    archive.write(recording("s1", 1))
    assert names(archive) == ["s1.tokentape"]


@pytest.mark.parametrize("url", ["nosuchthing://bucket/x", "s3fsless+x://"])
def test_an_archive_that_cannot_be_opened(url: str, tmp_path: Path) -> None:
    """A worker does not start with an archive that fsspec does not know."""
    with pytest.raises(ArchiveError, match="archive-url cannot be used"):
        Archive(url)
    with pytest.raises(ArchiveError, match="archive-url cannot be used"):
        run(AssemblerSettings(redis_url="redis://r", tokenizer=str(tmp_path), archive_url=url))


def test_the_url_is_not_shown() -> None:
    """The settings' text holds no URL, which may hold a password."""
    settings = AssemblerSettings(redis_url="r", tokenizer="t", archive_url="ftp://user:secret@host/x")
    assert "secret" not in repr(settings)


async def test_an_error_that_quotes_the_url_is_told_without_its_password(
    fake: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Some file systems put the whole URL into what they raise: no error or log line shows its password."""
    url = "memory://me:s3%21cret@host/x"

    def fail(*_: object, **__: object) -> None:
        raise OSError(f"cannot write to {url}: s3!cret is wrong")

    with monkeypatch.context() as patch:
        patch.setattr("fsspec.core.url_to_fs", fail)
        with pytest.raises(ArchiveError, match="cannot write to memory") as caught:
            Archive(url)
    archive = Archive(url)
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    await seal(fake, "s1")
    assert await Archiver(fake, archive, after_s=0.0).round() == 0
    assert "cannot write to memory://me:***@host/x: *** is wrong" in caplog.text
    assert "cret" not in caplog.text + "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "url", ["simplecache::s3://me:s3cret@host/x", "s3://s3cret@host/x", "s3://me:s3cret/+@host/x"]
)
def test_credentials_stand_anywhere_before_the_host(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chained URL, a token without a user, and a password that should have been percent-encoded."""

    def fail(*_: object) -> None:
        raise OSError(f"cannot open {url}")

    monkeypatch.setattr("fsspec.core.url_to_fs", fail)
    with pytest.raises(ArchiveError, match="cannot open s") as caught:
        Archive(url)
    assert "cret" not in str(caught.value)


@pytest.mark.slow
async def test_a_worker_process_archives(
    server: Server, client: redis.asyncio.Redis, tokenizer: Path, tmp_path: Path
) -> None:
    """A worker with an archive copies a session that was sealed long enough ago, and stops in order."""
    target = tmp_path / "archive"
    store = RedisStore(client)
    await record(store, turns=2)
    await store.seal("s1", sealed())
    await client.zadd(keys.SEALED, {"s1": 1.0})
    worker = WorkerProcess.start(tmp_path, server.url, tokenizer, archive_url=target.as_uri())
    try:
        await worker.ready()
        await until((target / "s1.tokentape").exists, timeout_s=30)
        await until(lambda: "archived session=s1" in worker.log)
        worker.process.terminate()
        assert await worker.ended() == 0
    finally:
        worker.kill()
