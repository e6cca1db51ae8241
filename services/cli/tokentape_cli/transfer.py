"""`tokentape export` and `tokentape import`: sessions as a file that replays anywhere, bit for bit."""

import argparse
import asyncio
import os
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from tokentape_cli import options
from tokentape_cli.arguments import TRANSFER_OPTIONS
from tokentape_cli.options import UsageError
from tokentape_contracts.errors import StoreUnavailable
from tokentape_core.recording import Recording, RecordingError, dump, ensure_whole, load
from tokentape_core.store import RedisStore, SessionExists, connect


def export(arguments: argparse.Namespace) -> int:
    """Writes sessions to a file; 1 if that fails, also if Redis cannot be reached.

    Raises:
        UsageError: there is no such session.
    """
    try:
        recordings = asyncio.run(_read(arguments.session, _redis_url(arguments)))
        for recording in recordings:
            _warn_unless_whole(recording)
        data = dump(recordings)
        _write_file(arguments.output, data)
    except StoreUnavailable as error:
        return _failed("export", error.detail)
    except OSError as error:
        return _failed("export", f"{arguments.output}: {error}")
    print(f"{arguments.output}: {len(recordings)} sessions, {len(data)} bytes")
    return 0


def import_(arguments: argparse.Namespace) -> int:
    """Writes the sessions of a file to Redis; 1 if the file or a session of it cannot be taken.

    Raises:
        UsageError: the file cannot be read.
    """
    redis_url = _redis_url(arguments)
    try:
        data = arguments.file.read_bytes()
    except OSError as error:
        raise UsageError(f"{arguments.file}: {error}") from error
    try:
        recordings = load(data)
        for recording in recordings:
            ensure_whole(recording)
        written = asyncio.run(_restore(recordings, redis_url))
    except (RecordingError, SessionExists, StoreUnavailable) as error:
        return _failed("import", str(error))
    for recording, is_new in zip(recordings, written, strict=True):
        print(f"{recording.session_id}: {'written' if is_new else 'was there already, the same'}")
    return 0


def _redis_url(arguments: argparse.Namespace) -> str:
    settings = options.resolve(arguments, TRANSFER_OPTIONS)
    options.required(settings, *TRANSFER_OPTIONS)
    return str(settings["redis-url"].value)


async def _read(session_ids: Sequence[str], redis_url: str) -> list[Recording]:
    store = RedisStore(connect(redis_url))
    try:
        recordings = []
        for session_id in dict.fromkeys(session_ids):
            recording = await store.export(session_id)
            if recording is None:
                raise UsageError(f"there is no session {session_id}")
            recordings.append(recording)
        return recordings
    finally:
        await store.close()


async def _restore(recordings: Sequence[Recording], redis_url: str) -> list[bool]:
    """Writes sessions; which of them were not there. If one cannot be taken, none is written."""
    store = RedisStore(connect(redis_url))
    try:
        for recording in recordings:
            there = await store.export(recording.session_id)
            if there is not None and not there.contains(recording):
                raise SessionExists(f"session {recording.session_id} is there already, with other content")
        return [await store.restore(recording) for recording in recordings]
    finally:
        await store.close()


def _warn_unless_whole(recording: Recording) -> None:
    try:
        ensure_whole(recording)
    except RecordingError as error:
        print(f"tokentape export: it can be replayed, but not imported: {error}", file=sys.stderr)


def _write_file(path: Path, data: bytes) -> None:
    """All or nothing, in place of a file that is there."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _failed(command: str, reason: str) -> int:
    print(f"tokentape {command}: {reason}", file=sys.stderr)
    return 1
