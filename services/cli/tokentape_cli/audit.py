"""`tokentape replay`: a session assembled anew, and whether that is what was delivered (INV-9)."""

import argparse
import asyncio
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentape_cli import options
from tokentape_cli.arguments import REPLAY_OPTIONS
from tokentape_cli.options import UsageError
from tokentape_contracts import audit, jobs, keys
from tokentape_contracts.audit import AssembledBy, SamplesAssembled
from tokentape_contracts.errors import EventUnsupported, StoreUnavailable, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import AssembleJob, JobResult, StoredResult
from tokentape_contracts.samples import SUPPORTED_CONTRACTS, decode_samples
from tokentape_core.domain.state import turn_id
from tokentape_core.recording import Recording, RecordingError, load
from tokentape_core.store import MemoryStore, RedisStore, connect, redis_errors
from tokentape_core.text.settings import TextSettings

if TYPE_CHECKING:
    import redis.asyncio

    from tokentape_assembler.toolchain import Toolchain


def replay(arguments: argparse.Namespace) -> int:
    """Prints what a session gives, or whether it gives what was delivered; 1 if something differs.

    Raises:
        UsageError: nothing can be compared: no such session or turn, no tokenizer, a damaged file, no Redis.
    """
    settings = options.resolve(arguments, REPLAY_OPTIONS)
    options.required(settings, "tokenizer")
    text = options.text_settings(settings)
    hooks = options.values(settings, ("pick-hook", "finish-hook"))
    try:
        cases = _cases(arguments.session, settings["redis-url"].value)
    except (RecordingError, OSError) as error:
        raise UsageError(f"{arguments.session}: {error}") from error
    except StoreUnavailable as error:
        raise UsageError(error.detail) from error
    tails = [case.tail(arguments.at) for case in cases]
    toolchain = _toolchain(text, hooks)
    if arguments.verify:
        lines = [
            asyncio.run(_verify(case, toolchain, tail if arguments.at is not None else None))
            for case, tail in zip(cases, tails, strict=True)
        ]
        return 0 if all(lines) else 1
    for case, tail in zip(cases, tails, strict=True):
        asyncio.run(_show(case, toolchain, tail))
    return 0


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """A session to replay.

    Attributes:
        recording: all that is kept of it.
        results: `<request>` → outcome, of the results that Redis still holds.
    """

    recording: Recording
    results: Mapping[str, str] = field(default_factory=dict)

    def tail(self, at: int | None) -> str:
        """The id of the last event to read; by default that of the last turn."""
        ids = [entry_id for entry_id, _ in self.recording.events if entry_id != SEALED_ID]
        if not ids:
            raise UsageError(f"session {self.recording.session_id} has no events")
        if at is None:
            return ids[-1]
        tail = turn_id(at) if at else OPENED_ID
        if tail not in ids:
            raise UsageError(f"session {self.recording.session_id} has {len(ids) - 1} turns, and none {at}")
        return tail

    async def assemble(self, job: AssembleJob, toolchain: "Toolchain") -> JobResult:
        """The outcome of a job, by the code of the workers."""
        from tokentape_assembler.outcome import outcome_of

        store = MemoryStore()
        await store.restore(self.recording)
        return await outcome_of(job, store, toolchain.decode, toolchain.hooks, toolchain.renderer)


def _cases(session: str, redis_url: str | None) -> list[_Case]:
    if Path(session).is_file():
        return [_Case(recording) for recording in load(Path(session).read_bytes())]
    if redis_url is None:
        variable = options.variable("redis-url")
        raise UsageError(f"there is no file {session}; for a session --redis-url is needed (or {variable})")
    return [asyncio.run(_read(session, redis_url))]


async def _read(session_id: str, redis_url: str) -> _Case:
    client = connect(redis_url)
    try:
        recording = await RedisStore(client).export(session_id)
        if recording is None:
            raise UsageError(f"there is no session {session_id}, and no file of this name")
        return _Case(recording, await _results(client, recording))
    finally:
        await client.aclose()


async def _results(client: "redis.asyncio.Redis", recording: Recording) -> dict[str, str]:
    """What the results in Redis are by their bytes, whatever they say of themselves."""
    results = {}
    for _, fields in recording.audit:
        try:
            request = audit.decode(fields).request
        except (EventUnsupported, StreamCorrupt):  # `_verify` says so
            continue
        with redis_errors():
            found: Any = await client.hgetall(keys.samples(recording.session_id, request))  # type: ignore[misc]
        if found:
            stored = StoredResult.from_fields(found[jobs.HEAD.encode()], None)
            payload = b"".join(found.get(str(part).encode(), b"") for part in range(stored.parts))
            results[request] = _text(hashlib.sha256(payload).hexdigest(), _error(stored))
    return results


def _toolchain(text: TextSettings, hooks: Mapping[str, str | None]) -> "Toolchain":
    from tokentape_core.text.without_torch import without_torch

    without_torch()
    from tokentape_assembler.toolchain import load_toolchain
    from tokentape_core.loading import LoadError
    from tokentape_core.text.errors import TokenizerError

    try:
        return load_toolchain(text, **hooks)
    except (LoadError, TokenizerError) as error:
        raise UsageError(str(error)) from error


async def _show(case: _Case, toolchain: "Toolchain", tail: str) -> None:
    """Prints what a request without parameters gives, in each contract."""
    sid = case.recording.session_id
    print(f"session {sid} at {tail}")
    for contract in SUPPORTED_CONTRACTS:
        request = SamplesRequest(None, None, 0.0).digest(tail, contract)
        result = await case.assemble(AssembleJob(sid, tail, request, contract, None, None), toolchain)
        print(f"contract {contract}: {_text(result.digest, _error(result))}")
    if result.error is not None:
        return
    reply = decode_samples(result.payload, contract=contract)
    print(f"samples: {len(reply.samples)}{f', {reply.empty_reason}' if reply.empty_reason else ''}")
    for number, sample in enumerate(reply.samples):
        tokens, response = len(sample["tokens"]), sample["response_length"]
        print(f"sample {number}: {sample['status'].value}, {tokens} tokens, {response} of them response")


async def _verify(case: _Case, toolchain: "Toolchain", tail: str | None) -> bool:
    """Prints a line for each audit entry, or for those at `tail`; whether all are equal."""
    verdicts = []
    for entry_id, fields in case.recording.audit:
        try:
            entry = audit.decode(fields)
        except (EventUnsupported, StreamCorrupt) as error:
            print(f"DIFFERS  session={case.recording.session_id} audit={entry_id}\n  unread: {error.detail}")
            verdicts.append(False)
            continue
        if tail in (None, entry.tail):
            verdicts.append(await _verify_entry(case, toolchain, entry))
    if not verdicts:
        where = f" at {tail}" if tail else ""
        raise UsageError(f"session {case.recording.session_id}: no delivery{where} is in its audit")
    return all(verdicts)


async def _verify_entry(case: _Case, toolchain: "Toolchain", entry: SamplesAssembled) -> bool:
    sid = case.recording.session_id
    job = AssembleJob(sid, entry.tail, entry.request, entry.contract, entry.max_seq_len, entry.metadata)
    result = await case.assemble(job, toolchain)
    found = {
        "delivered": _text(entry.digest or "", entry.error),
        "replayed": _text(result.digest, _error(result)),
    }
    if entry.request in case.results:
        found["in Redis"] = case.results[entry.request]
    head = f"session={sid} tail={entry.tail} contract={entry.contract}"
    if len(set(found.values())) == 1:
        print(f"ok       {head} {found['replayed']}")
        return True
    print(f"DIFFERS  {head}")
    for line in (*(f"{name}: {text}" for name, text in found.items()), *_causes(entry, found, toolchain.by)):
        print(f"  {line}")
    return False


def _causes(entry: SamplesAssembled, found: Mapping[str, str], now: AssembledBy) -> Iterator[str]:
    """What may have made the difference."""
    if found.get("in Redis", found["delivered"]) != found["delivered"]:
        yield "The result in Redis is not the one in the audit: one of the two was changed."
    if found["replayed"] == found["delivered"]:
        return
    request = SamplesRequest(entry.max_seq_len, entry.metadata, 0.0).digest(entry.tail, entry.contract)
    differences = {
        "The audit entry was changed: its parameters are not its request's": (entry.request, request),
        "Another tokenizer or chat template": (entry.by.tokenizer, now.tokenizer),
        "Another tokenizer, chat template or family, or other options of these": (
            entry.by.template,
            now.template,
        ),
        "Another pick hook, which matters in a tree": (entry.by.pick, now.pick),
        "Another finish hook, which matters in a tree": (entry.by.finish, now.finish),
        "Another version of Tokentape": (entry.by.tokentape, now.tokentape),
    }
    causes = [
        f"{text}: {before or 'none'} then, {after or 'none'} now."
        for text, (before, after) in differences.items()
        if before != after
    ]
    yield from causes or (
        "Tokenizer, template, names of hooks and version are the same: the events, their routing replay rows",
        "or the audit entry were changed, or a hook was, or it does not always give the same.",
    )


def _error(result: JobResult | StoredResult) -> tuple[str, str] | None:
    return (result.error.code, result.error.detail) if result.error else None


def _text(digest: str, error: tuple[str, str] | None) -> str:
    """An outcome, to compare and to show."""
    return f"{error[0]}: {error[1]}" if error else f"sha-256={digest}"
