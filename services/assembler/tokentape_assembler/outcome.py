"""What a job gives: read the stream, fold it, assemble it, encode it."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, get_args

import numpy as np

from tokentape_assembler.counts import Counts
from tokentape_contracts.errors import (
    EventUnsupported,
    HookFailed,
    InternalError,
    PrefixBroken,
    ReplayBroken,
    SessionNotFound,
    StreamCorrupt,
    TokentapeError,
)
from tokentape_contracts.events import SEALED_ID
from tokentape_contracts.jobs import AssembleJob, JobResult
from tokentape_contracts.samples import MalformedSamples, encode_samples
from tokentape_core.comparison import comparison
from tokentape_core.domain.assemble import Assembly, assemble, name_of, replay_turns
from tokentape_core.domain.path import Decode
from tokentape_core.domain.state import SessionState, fold
from tokentape_core.domain.tree import DEFAULT_HOOKS, Finish, Hooks
from tokentape_core.domain.view import Compare
from tokentape_core.store import Store
from tokentape_core.text.mismatch import Kind
from tokentape_core.text.render import ChatRenderer

REFUSALS: Final[tuple[type[TokentapeError], ...]] = (
    EventUnsupported,
    HookFailed,
    PrefixBroken,
    ReplayBroken,
    SessionNotFound,
    StreamCorrupt,
)
"""Errors that the same events give every time in this version: outcomes, like samples."""
MISMATCHES: Final[tuple[str, ...]] = get_args(Kind)
"""The types of `tito_session_mismatch`."""


@dataclass(frozen=True, slots=True)
class Assembled(JobResult):
    """A job's result, how many samples it holds, and what was counted."""

    samples: int = 0
    counts: Counts = field(default_factory=Counts)


async def outcome_of(
    job: AssembleJob,
    store: Store,
    decode: Decode,
    hooks: Hooks = DEFAULT_HOOKS,
    renderer: ChatRenderer | None = None,
) -> Assembled:
    """The outcome of a job. Equal for equal events up to the tail but for `timing_ms` (INV-9).

    `timing_ms`: `fold` with the reading of stream and routing replay rows, `assemble`, `encode`; the stages
    before a refusal.

    Raises:
        StoreUnavailable: the events cannot be read. Like every other exception it is not an outcome.
    """
    timing_ms: dict[str, float] = {}
    mark = perf_counter()

    def lap(stage: str) -> None:
        nonlocal mark
        mark, before = perf_counter(), mark
        timing_ms[stage] = round((mark - before) * 1000, 3)

    lost = 0
    try:
        state = fold(await store.read(job.session_id, until=job.tail))
        lost = _lost(job.tail, state)
        state = _whole(state, job.tail)
        rows = [(turn.event, kind) for turn in replay_turns(state) for kind in turn.event.replay]
        stored = await store.read_blobs(job.session_id, rows)
        lap("fold")
        assembly = assemble(
            state,
            decode,
            max_seq_len=job.max_seq_len,
            metadata=job.metadata,
            session_id=job.session_id,
            hooks=hooks,
            compare=_comparison(renderer, state) if renderer else None,
            stored=stored,
        )
        _ensure_accounted(state, assembly)
        lap("assemble")
        payload = _encoded(assembly, state, job.contract, hooks.finish)
    except REFUSALS as error:
        return Assembled(b"", "", timing_ms, error, counts=Counts(lost=lost))
    digest = hashlib.sha256(payload).hexdigest()
    lap("encode")
    counts = _counts(state, assembly)
    return Assembled(payload, digest, timing_ms, samples=len(assembly.samples), counts=counts)


def _comparison(renderer: ChatRenderer, state: SessionState) -> Compare | None:
    return comparison(renderer, state.opened.template, state.opened.opened_at)


def _ensure_accounted(state: SessionState, assembly: Assembly) -> None:
    """Counts once more, from the events and the samples themselves (INV-11).

    Raises:
        InternalError: a sampled token is neither trained nor named, or one is trained twice.
    """
    said = assembly.accounting
    sampled = sum(len(turn.event.output) for turn in state.turns)
    trained = sum(int(np.count_nonzero(sample.loss_mask)) for sample in assembly.samples)
    left_out = sum(entry.tokens for entry in said.left_out)
    if (sampled, trained) != (said.sampled_tokens, said.trained_tokens) or sampled != trained + left_out:
        raise InternalError(
            f"{sampled} tokens were sampled, {trained} are trained and {left_out} named as left out"
        )


def _encoded(assembly: Assembly, state: SessionState, contract: int, finish: Finish) -> bytes:
    """The payload.

    Raises:
        HookFailed: a tree's samples cannot be carried; ours can, so that is what the hook made of them.
    """
    try:
        return encode_samples(
            assembly.samples, assembly.session_metadata, assembly.empty_reason, contract=contract
        )
    except MalformedSamples as error:
        if state.opened.mode != "tree":
            raise
        raise HookFailed(f"finish hook {name_of(finish)} left what a sample cannot hold: {error}") from error


def _whole(state: SessionState | None, tail: str) -> SessionState:
    """The session as it was when the API accepted the request: what came after the tail is not seen."""
    if state is None:
        raise SessionNotFound("the session's events are gone: it expired before its samples were assembled")
    if state.last_id != tail:
        # A failover of Redis can lose acknowledged turns; a shorter sample would hide it (INV-1).
        raise StreamCorrupt(f"the stream ends at {state.last_id}, but {tail} was recorded")
    return state


def _lost(tail: str, state: SessionState | None) -> int:
    """How many turns up to the tail, all of them acknowledged, are not in the stream."""
    if tail == SEALED_ID:
        return 0
    return int(tail.partition("-")[0]) - (len(state.turns) if state else 0)


def _counts(state: SessionState, assembly: Assembly) -> Counts:
    if state.opened.mode == "tree":
        compared = [sample.metadata for sample in assembly.samples]
    else:
        compared = [assembly.session_metadata]
    # A finish hook may have put something else there; that is no reason to fail.
    found = [metadata.get("tito_session_mismatch") for metadata in compared]
    entries = [entry for some in found if isinstance(some, list) for entry in some]
    types = [entry.get("type") for entry in entries if isinstance(entry, dict)]
    continued = {turn.event.parent for turn in state.turns} - {0}
    return Counts(
        samples=dict(Counter(sample.status.value for sample in assembly.samples)),
        picked=assembly.picked,
        dropped=len(state.turns) - len(continued) - assembly.picked,
        tokens=assembly.accounting.fates,
        mismatches=dict(Counter(kind for kind in types if isinstance(kind, str) and kind in MISMATCHES)),
    )
