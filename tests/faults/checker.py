"""Compares what the clients were told with what is in Redis, session by session.

Nothing here trusts the code under test more than it must: ids are compared as Redis gives them, tokens with
what the engine gave each client. Only INV-9 is checked with the assembler itself.

Checked are INV-1 to INV-4, INV-7 and INV-8 as far as clients can tell, INV-9, and of INV-10 the deadlines
(`cluster.leftovers` has the rest). What is not checked here is about time and size, of which a history under
faults says nothing:

- INV-5, the loop never waits for CPU: `tests/api/test_engine_loop.py`, `tests/assembler/test_executor.py`,
  `tests/text/test_render.py`
- INV-6, linear cost: `tests/unit/test_decide.py`, `tests/property/test_replay.py`,
  `tests/contracts/test_samples.py`, and the benchmarks `collect_cpu` and `replay_bytes`
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import redis.asyncio

from tests.faults.engine import DIGEST, digest_of
from tests.faults.history import Call, History
from tokentape_assembler.outcome import outcome_of
from tokentape_contracts import keys
from tokentape_contracts.errors import TokentapeError
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Fields, TurnRecorded, decode
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import AssembleJob
from tokentape_contracts.samples import decode_samples
from tokentape_core.domain.path import Decode
from tokentape_core.domain.state import SessionState, fold, turn_id
from tokentape_core.recording import part_names
from tokentape_core.store.port import Entry
from tokentape_core.text.render import ChatRenderer

SLACK_S = 3.0
"""A busy machine may answer so much later than a deadline."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A session as it lies in Redis.

    Attributes:
        entries: the whole stream, as Redis gives it.
        blobs: the hash beside it.
    """

    entries: list[tuple[str, Fields]]
    blobs: Mapping[str, bytes] = field(default_factory=dict)


@dataclass
class Report:
    """What the checker found.

    Attributes:
        problems: a sentence for each broken promise; none is what a test wants.
        acknowledged: turns that a client got.
        recorded: turns in the streams.
        lost: of the acknowledged, not in the stream.
        doubled: turns of one attempt beyond the first.
        unclear: turns that are recorded although their client got no answer, which is allowed.
        collects: samples that were delivered and assembled again.
    """

    problems: list[str] = field(default_factory=list)
    acknowledged: int = 0
    recorded: int = 0
    lost: int = 0
    doubled: int = 0
    unclear: int = 0
    collects: int = 0


async def read_all(client: redis.asyncio.Redis, sessions: Collection[str]) -> dict[str, Recorded]:
    """Reads every session of a history anew."""
    found = {}
    for session in sessions:
        rows = await client.xrange(keys.events(session))
        blobs = await client.hgetall(keys.blobs(session))  # type: ignore[misc]
        found[session] = Recorded(
            [(entry_id.decode(), fields) for entry_id, fields in rows],
            {name.decode("latin-1"): data for name, data in blobs.items()},
        )
    return found


async def check(
    history: History,
    recorded: Mapping[str, Recorded],
    decode_ids: Decode,
    renderer: ChatRenderer | None = None,
    *,
    allowed: Collection[str] = (),
) -> Report:
    """Everything that must hold after a run.

    Args:
        decode_ids, renderer: as the workers have them.
        allowed: codes of refusals that this run's faults explain.
    """
    report = Report()
    report.problems += _answers(history, allowed)
    for session in history.sessions:
        if session not in recorded:
            report.problems.append(f"INV-1: session {session} was opened and is not there")
            continue
        await _Session(history, session, recorded[session], report, decode_ids, renderer, allowed).check()
    return report


def _answers(history: History, allowed: Collection[str]) -> Iterator[str]:
    """Every request was answered in its time, and no answer is one that it should not be."""
    if missing := history.started - len(history.calls):
        yield f"INV-10: {missing} requests never ended"
    for call in history.calls:
        if call.ended - call.began > call.deadline_s + SLACK_S:
            yield f"INV-10: later than its {call.deadline_s:g} s: {call}"
        if call.status is None or call.ok:
            continue
        if not call.code:
            yield f"INV-7: no code: {call}"
        elif call.retry != ("true" if call.status in (429, 503, 504) else "false"):
            yield f"INV-7: x-should-retry is {call.retry!r}: {call}"
        elif call.status >= 500 and call.code not in allowed:
            yield f"INV-7: not explained by a fault: {call}"
        elif call.code == "queue_full" and not call.retry_after:
            yield f"INV-7: no Retry-After: {call}"


class _Session:
    """The checks of one session."""

    def __init__(
        self,
        history: History,
        session: str,
        recorded: Recorded,
        report: Report,
        decode_ids: Decode,
        renderer: ChatRenderer | None,
        allowed: Collection[str],
    ) -> None:
        self._id = session
        self._allowed = allowed
        self._calls = [call for call in history.calls if call.session == session]
        self._chats = {call.attempt: call for call in self._calls if call.kind == "chat"}
        (self._opened,) = (call for call in self._calls if call.kind == "open" and call.ok)
        self._recorded = recorded
        self._report = report
        self._decode_ids = decode_ids
        self._renderer = renderer
        self._digests: dict[tuple[int, str], str] = {}

    def _complain(self, problem: str) -> None:
        self._report.problems.append(f"{problem} (session {self._id})")

    async def check(self) -> None:
        self._ids()
        try:
            entries = [(entry_id, decode(fields)) for entry_id, fields in self._recorded.entries]
            state = fold(entries)
        except TokentapeError as error:
            self._complain(f"INV-3: the stream cannot be folded: {error.detail}")
            return
        if state is None:
            self._complain("INV-1: the session was opened, and its stream is empty")
            return
        self._turns(state)
        self._end(state)
        for call in self._calls:
            if call.kind == "collect" and call.ok:
                await self._delivery(call, state, entries)

    def _ids(self) -> None:
        """INV-3: 0-1, 1-0, 2-0 …, and nothing behind the seal."""
        ids = [entry_id for entry_id, _ in self._recorded.entries]
        turns = len(ids) - 1 - (SEALED_ID in ids)
        expected = [OPENED_ID, *(turn_id(seq) for seq in range(1, turns + 1)), SEALED_ID]
        if ids != expected[: len(ids)]:
            self._complain(f"INV-3: the ids are {ids}")

    def _turns(self, state: SessionState) -> None:
        """INV-1 and INV-2: what was acknowledged is there, once, as it was; what was refused is not."""
        times = Counter(str(turn.event.request.get("user")) for turn in state.turns)
        self._report.recorded += len(state.turns)
        for attempt, count in times.items():
            if count > 1:
                self._report.doubled += count - 1
                self._complain(f"INV-1: doubled: {attempt} is recorded {count} times")
            if attempt not in self._chats:
                self._complain(f"INV-1: nobody asked for the recorded turn {attempt}")
            elif not (call := self._chats[attempt]).ok:
                self._report.unclear += call.unclear
                if not call.unclear:
                    self._complain(f"INV-1: recorded, but told otherwise: {call}")
        for call in self._chats.values():
            if call.ok:
                self._report.acknowledged += 1
                if call.attempt not in times:
                    self._report.lost += 1
                    self._complain(f"INV-1: lost: {call}")
        for turn in state.turns:
            prompt = digest_of(turn.tokens[: turn.prompt_length])
            if prompt != turn.event.meta.get(DIGEST):
                self._complain(f"INV-2: turn {turn.seq} begins with other tokens than the engine got")
            call = self._chats.get(str(turn.event.request.get("user")))
            if call is None:
                continue
            parent = turn.parent.event.response_id if turn.parent else ""
            if parent != call.continues:
                self._complain(f"INV-4: turn {turn.seq} continues {parent!r}, not {call.continues!r}: {call}")
            if call.ok:
                self._same(turn.event, call)

    def _same(self, event: TurnRecorded, call: Call) -> None:
        message = (event.response_id, event.messages[-1]["content"])
        if message != (call.response_id, call.text):
            self._complain(
                f"INV-2: recorded as {message}, but told {call.response_id}, {call.text!r}: {call}"
            )
        if call.streams:
            return
        output = tuple(zip(event.output.tolist(), event.logprobs.tolist(), strict=True))
        if (output, event.meta.get(DIGEST)) != (call.output, call.prompt_digest):
            self._complain(f"INV-2: recorded as {output}, but told {call.output}: {call}")

    def _end(self, state: SessionState) -> None:
        """INV-8, and that nothing happens behind an acknowledged DELETE."""
        deletes = [call for call in self._calls if call.kind == "delete"]
        for call in deletes:
            if call.status is not None and call.status != 204 and not call.unclear:
                self._complain(f"INV-8: {call}")
        acknowledged = [call.ended for call in deletes if call.ok]
        if acknowledged and state.sealed is None:
            self._complain("INV-8: lost: a DELETE was acknowledged, and there is no seal")
        if state.sealed is not None and not deletes:
            self._complain("INV-8: sealed, and nobody sent a DELETE")
        sealed_by = min(acknowledged, default=float("inf"))
        first_delete = min((call.began for call in deletes), default=float("inf"))
        in_stream = {str(turn.event.request.get("user")) for turn in state.turns}
        for call in self._calls:
            if call.kind not in ("chat", "collect"):
                continue
            if call.began > sealed_by and (call.ok or call.attempt in in_stream):
                self._complain(f"INV-3: behind the seal: {call}")
            if call.status is not None and 400 <= call.status < 500:
                is_gone = (call.status, call.code) == (404, "session_deleted")
                if call.code not in self._allowed and (not is_gone or call.ended < first_delete):
                    self._complain(f"INV-7: refused without a reason: {call}")

    async def _delivery(self, call: Call, state: SessionState, entries: list[Entry]) -> None:
        """INV-1, INV-2, INV-9: a payload is what its tail gives, and has what was acknowledged."""
        self._report.collects += 1
        if hashlib.sha256(call.payload).hexdigest() != call.digest:
            self._complain(f"INV-9: the payload has another digest than its header: {call}")
            return
        seqs = {str(turn.event.request.get("user")): turn.seq for turn in state.turns}
        known = [c for c in self._chats.values() if c.ok and c.ended <= call.began]
        least = max((seqs.get(c.attempt, 0) for c in known), default=0)
        tail = len(state.turns)
        while tail >= 0 and await self._digest(call, tail) != call.digest:
            tail -= 1
        if tail < 0:
            self._complain(f"INV-9: no tail of the stream gives the delivered digest: {call}")
        elif tail < least:
            self._complain(f"INV-1: turn {least} was acknowledged, and the samples end at {tail}: {call}")
        elif self._opened.mode == "linear":
            self._linear(call, fold(entries[: tail + 1]))
        if call.handed is not None:
            self._handed(call, call.handed)

    def _handed(self, call: Call, handed: Sequence[Sequence[int]]) -> None:
        """What the driver made of a payload has the payload's tokens."""
        samples = decode_samples(call.payload, contract=call.contract).samples
        if [list(tokens) for tokens in handed] != [list(sample["tokens"]) for sample in samples]:
            self._complain(f"INV-2: the driver gave other tokens than the payload has: {call}")

    def _linear(self, call: Call, state: SessionState | None) -> None:
        """The one sample is the newest turn's path, to the id, and trains what was sampled on it."""
        samples = decode_samples(call.payload, contract=call.contract).samples
        if state is None or state.head is None:
            if samples:
                self._complain(f"INV-2: samples without a turn: {call}")
            return
        (sample,) = samples
        if not np.array_equal(np.asarray(sample["tokens"]), state.head.tokens):
            self._complain(f"INV-2: the sample's tokens are not the recorded ones: {call}")
        trained = int(np.sum(sample["loss_mask"]))
        if trained != sum(len(turn.event.output) for turn in state.head.path):
            self._complain(f"INV-2: {trained} tokens are trained, which is not what was sampled: {call}")

    async def _digest(self, call: Call, turns: int) -> str:
        """What assembling the first turns again gives."""
        asked = SamplesRequest(max_seq_len=call.asked.get("max_seq_len"), metadata=call.asked.get("metadata"))
        tail = turn_id(turns) if turns else OPENED_ID
        request = asked.digest(tail, call.contract)
        if (turns, request) not in self._digests:
            job = AssembleJob(self._id, tail, request, call.contract, asked.max_seq_len, asked.metadata)
            outcome = await outcome_of(
                job, _Prefix(self._recorded), self._decode_ids, renderer=self._renderer
            )
            self._digests[turns, request] = outcome.digest
            await asyncio.sleep(0)
        return self._digests[turns, request]


class _Prefix:
    """A store that holds one session; only what `outcome_of` reads."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded

    async def read(
        self, session_id: str, *, after: str | None = None, until: str | None = None
    ) -> list[Entry]:
        ids = [entry_id for entry_id, _ in self._recorded.entries]
        stop = ids.index(until) + 1 if until in ids else len(ids)
        return [(entry_id, decode(fields)) for entry_id, fields in self._recorded.entries[:stop]]

    async def read_blobs(
        self, session_id: str, wanted: Sequence[tuple[TurnRecorded, str]]
    ) -> dict[tuple[str, str], bytes]:
        return {
            (event.id, kind): b"".join(self._recorded.blobs[name] for name in part_names(event, kind))
            for event, kind in wanted
        }
