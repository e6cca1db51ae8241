"""What a job gives: read the stream, fold it, assemble it, encode it."""

import hashlib
from dataclasses import dataclass
from time import perf_counter
from typing import Final

from tokentape_contracts.errors import (
    EventUnsupported,
    HookFailed,
    PrefixBroken,
    ReplayBroken,
    SessionNotFound,
    StreamCorrupt,
    TokentapeError,
)
from tokentape_contracts.jobs import AssembleJob, JobResult
from tokentape_contracts.samples import encode_samples
from tokentape_core.comparison import comparison
from tokentape_core.domain.assemble import assemble, replay_turns
from tokentape_core.domain.path import Decode
from tokentape_core.domain.state import SessionState, fold
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks
from tokentape_core.store import Store
from tokentape_core.text.render import ChatRenderer

REFUSALS: Final[tuple[type[TokentapeError], ...]] = (
    EventUnsupported,
    HookFailed,
    PrefixBroken,
    ReplayBroken,
    SessionNotFound,
    StreamCorrupt,
)
"""Errors that the same events give every time: outcomes, like samples."""


@dataclass(frozen=True, slots=True)
class Assembled(JobResult):
    """A job's result, and how many samples it holds."""

    samples: int = 0


async def outcome_of(
    job: AssembleJob,
    store: Store,
    decode: Decode,
    hooks: Hooks = DEFAULT_HOOKS,
    renderer: ChatRenderer | None = None,
) -> Assembled:
    """The outcome of a job. Equal for equal events up to the tail but for `timing_ms` (INV-9).

    `timing_ms`: `fold` with the reading of stream and replay rows, `assemble`, `encode`; the stages before a
    refusal.

    Raises:
        StoreUnavailable: the events cannot be read. Like every other exception it is not an outcome.
    """
    timing_ms: dict[str, float] = {}
    mark = perf_counter()

    def lap(stage: str) -> None:
        nonlocal mark
        mark, before = perf_counter(), mark
        timing_ms[stage] = round((mark - before) * 1000, 3)

    try:
        state = await _read(job, store)
        rows = [(turn.event, kind) for turn in replay_turns(state) for kind in turn.event.replay]
        stored = await store.read_blobs(job.session_id, rows)
        lap("fold")
        assembly = assemble(
            state,
            decode,
            max_seq_len=job.max_seq_len,
            metadata=job.metadata,
            hooks=hooks,
            compare=comparison(renderer, state.opened.template) if renderer else None,
            stored=stored,
        )
        lap("assemble")
    except REFUSALS as error:
        return Assembled(b"", "", timing_ms, error)
    payload = encode_samples(
        assembly.samples, assembly.session_metadata, assembly.empty_reason, contract=job.contract
    )
    digest = hashlib.sha256(payload).hexdigest()
    lap("encode")
    return Assembled(payload, digest, timing_ms, samples=len(assembly.samples))


async def _read(job: AssembleJob, store: Store) -> SessionState:
    """The session as it was when the API accepted the request: what came after the tail is not seen."""
    state = fold(await store.read(job.session_id, until=job.tail))
    if state is None:
        raise SessionNotFound("the session's events are gone: it expired before its samples were assembled")
    if state.last_id != job.tail:
        # A failover of Redis can lose acknowledged turns; a shorter sample would hide it (INV-1).
        raise StreamCorrupt(f"the stream ends at {state.last_id}, but {job.tail} was recorded")
    return state
