"""The checker complains about everything that must not be, and about nothing else."""

import dataclasses
import hashlib
import os
from collections.abc import Callable
from typing import Any

import fakeredis
import numpy as np
import pytest

from tests.faults import cluster
from tests.faults.checker import Recorded, Report, check
from tests.faults.engine import DIGEST, digest_of
from tests.faults.history import Call, History
from tests.support.sessions import opened, sealed, turn
from tokentape_assembler import outcome
from tokentape_assembler.outcome import outcome_of
from tokentape_contracts import keys, limits
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Fields, encode
from tokentape_contracts.http import SamplesRequest
from tokentape_contracts.jobs import AssembleJob
from tokentape_contracts.samples import Sample
from tokentape_core.domain.assemble import Assembly, assemble
from tokentape_core.store import MemoryStore

SID = "a" * 32
GONE = 2**30
"""A process id that no process can have."""


def text_of(ids: Any) -> str:
    return " ".join(map(str, ids))


def call(kind: Any, began: float, status: int | None = 200, **given: Any) -> Call:
    fields = {"session": SID, "ended": began + 0.5, "deadline_s": 5.0, **given}
    return Call(kind=kind, began=began, status=status, **fields)


def event(seq: int) -> Any:
    """Turn number `seq` of a conversation; its two outputs are like no other turn's."""
    before = [n for earlier in range(1, seq) for n in (9, 10 * earlier, 10 * earlier + 1)]
    return turn(
        id=f"{seq:032x}",
        parent=seq - 1,
        keep=len(before),
        suffix=[9],
        output=[10 * seq, 10 * seq + 1],
        response_id=f"r{seq}",
        messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": f"t{seq}"}],
        request={"user": f"a{seq}"},
        meta={DIGEST: digest_of([*before, 9])},
    )


def chat(seq: int, began: float, **given: Any) -> Call:
    """The call that was answered with turn `seq`."""
    recorded = event(seq)
    told = {
        "attempt": f"a{seq}",
        "continues": f"r{seq - 1}" if seq > 1 else "",
        "response_id": f"r{seq}",
        "text": f"t{seq}",
        "output": tuple((token, -0.5) for token in recorded.output.tolist()),
        "prompt_digest": recorded.meta[DIGEST],
    }
    return call("chat", began, **{**told, **given})


class Story:
    """Three turns, of which the client of the second got no answer; a collect; a DELETE; and a late chat."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Fields]] = [
            (OPENED_ID, encode(opened(id="0" * 32))),
            *((f"{seq}-0", encode(event(seq))) for seq in (1, 2, 3)),
            (SEALED_ID, encode(sealed(id="f" * 32))),
        ]
        self.calls = [
            call("open", 0, mode="linear"),
            chat(1, 1),
            chat(2, 2, status=None, error="reset", response_id="", output=(), prompt_digest=""),
            chat(3, 3),
            call("chat", 4, 503, code="store_unavailable", retry="true", attempt="a4", continues="r3"),
            call("collect", 5),
            call("delete", 6, 204),
            call("delete", 6.2, None, error="reset"),
            call("chat", 7, 404, code="session_deleted", retry="false", attempt="a5", continues="r3"),
        ]

    async def deliver(self, turns: int = 3) -> None:
        """Fills the collect's answer with what so many turns give."""
        store = MemoryStore()
        await store.open(SID, opened(id="0" * 32))
        for seq in range(1, turns + 1):
            await store.append(SID, seq, event(seq))
        asked = SamplesRequest()
        tail = f"{turns}-0"
        job = AssembleJob(SID, tail, asked.digest(tail, 1), 1, None, None)
        delivered = await outcome_of(job, store, text_of)
        self.change("collect", 5, payload=delivered.payload, digest=delivered.digest)

    def change(self, kind: str, at: float, /, **changes: Any) -> None:
        """Replaces fields of one call."""
        (index,) = (i for i, c in enumerate(self.calls) if (c.kind, c.began) == (kind, at))
        self.calls[index] = dataclasses.replace(self.calls[index], **changes)

    async def report(self) -> Report:
        history = History()
        history.calls, history.started = self.calls, len(self.calls)
        allowed = {"store_unavailable", "queue_full"}
        return await check(history, {SID: Recorded(self.entries)}, text_of, allowed=allowed)


async def test_a_true_story_is_believed() -> None:
    """No complaint about a history that holds, a turn of unclear outcome included; the figures are right.

    The same with a client that streams, which is told less, and with a driver.
    """
    story = Story()
    await story.deliver()
    report = await story.report()
    assert report == Report([], acknowledged=2, recorded=3, lost=0, doubled=0, unclear=1, collects=1)
    tokens = (9, 10, 11, 9, 20, 21, 9, 30, 31)
    story.change("chat", 3, streams=True, output=(), prompt_digest="")
    story.change("collect", 5, handed=(tokens,))
    assert await story.report() == report


def _lose(story: Story) -> None:
    story.entries[1:4] = story.entries[1:3]
    story.change("collect", 5, status=None, payload=b"")


def _double(story: Story) -> None:
    again = dataclasses.replace(event(3), id="e" * 32)
    story.entries.insert(4, ("4-0", encode(again)))


def _resurrect(story: Story) -> None:
    story.change("chat", 3, status=502, code="engine_reply_invalid", retry="false")


def _behind_the_seal(story: Story) -> None:
    story.entries.append(("4-0", encode(event(3))))


def _gap(story: Story) -> None:
    story.entries[3] = ("4-0", story.entries[3][1])


def _wrong_token(story: Story) -> None:
    story.change("chat", 1, output=((10, -0.5), (12, -0.5)))


def _wrong_logprob(story: Story) -> None:
    story.change("chat", 1, output=((10, -0.5), (11, -0.25)))


def _wrong_text(story: Story) -> None:
    story.change("chat", 1, text="t2", streams=True)


def _wrong_id(story: Story) -> None:
    story.change("chat", 1, response_id="r9", streams=True)


def _altered_by_the_driver(story: Story) -> None:
    story.change("collect", 5, handed=((9, 10, 11),))


def _wrong_prompt(story: Story) -> None:
    changed = dataclasses.replace(event(2), suffix=np.array([8], np.int32))
    story.entries[2] = ("2-0", encode(changed))


def _wrong_parent(story: Story) -> None:
    story.change("chat", 3, continues="r1")


def _unknown(story: Story) -> None:
    story.calls = [c for c in story.calls if c.attempt != "a2"]


def _unsealed(story: Story) -> None:
    del story.entries[-1]


def _sealed_by_nobody(story: Story) -> None:
    story.calls = [c for c in story.calls if c.kind != "delete" and c.status != 404]


def _answered_behind_the_seal(story: Story) -> None:
    story.change("chat", 3, began=7.5, ended=8.0)


def _late(story: Story) -> None:
    story.change("delete", 6, ended=60.0)


def _defect(story: Story) -> None:
    story.change("chat", 4, status=500, code="internal_error", retry="false")


def _without_code(story: Story) -> None:
    story.change("chat", 4, code="")


def _final(story: Story) -> None:
    story.change("chat", 4, retry="false")


def _retryable(story: Story) -> None:
    story.change("chat", 7, retry="true")


def _full(story: Story) -> None:
    story.change("chat", 4, code="queue_full")


def _refused(story: Story) -> None:
    story.change("chat", 4, status=400, code="cannot_extend", retry="false")


def _delete_refused(story: Story) -> None:
    story.change("delete", 6.2, status=404, code="session_not_found", retry="false")


def _wrong_payload(story: Story) -> None:
    story.change("collect", 5, payload=b"x")


def _foreign_payload(story: Story) -> None:
    story.change("collect", 5, payload=b"x", digest=hashlib.sha256(b"x").hexdigest())


LIES: dict[str, tuple[Callable[[Story], None], str]] = {
    "a lost turn": (_lose, "INV-1: lost: chat a3"),
    "a doubled turn": (_double, "INV-1: doubled: a3 is recorded 2 times"),
    "a turn that was refused": (_resurrect, "INV-1: recorded, but told otherwise"),
    "an entry behind the seal": (_behind_the_seal, "INV-3: the ids are"),
    "a gap": (_gap, "INV-3: the ids are"),
    "a wrong token": (_wrong_token, "INV-2: recorded as"),
    "a wrong log-prob": (_wrong_logprob, "INV-2: recorded as"),
    "a streamed answer with a wrong text": (_wrong_text, "INV-2: recorded as ('r1', 't1')"),
    "a streamed answer with a wrong id": (_wrong_id, "INV-2: recorded as ('r1', 't1')"),
    "samples that the driver altered": (_altered_by_the_driver, "INV-2: the driver gave other tokens"),
    "a wrong prompt": (_wrong_prompt, "INV-2: turn 2 begins with other tokens"),
    "a wrong parent": (_wrong_parent, "INV-4: turn 3 continues 'r2', not 'r1'"),
    "a turn that nobody asked for": (_unknown, "INV-1: nobody asked for the recorded turn a2"),
    "a lost seal": (_unsealed, "INV-8: lost: a DELETE was acknowledged"),
    "a seal out of nowhere": (_sealed_by_nobody, "INV-8: sealed, and nobody"),
    "an answer behind the seal": (_answered_behind_the_seal, "INV-3: behind the seal: chat a3"),
    "a late answer": (_late, "INV-10: later than its 5 s: delete"),
    "a defect": (_defect, "INV-7: not explained by a fault"),
    "an error without a code": (_without_code, "INV-7: no code"),
    "an outage that is said to be final": (_final, "INV-7: x-should-retry is 'false': chat a4"),
    "a refusal that is said to pass": (_retryable, "INV-7: x-should-retry is 'true': chat a5"),
    "a full queue without a time": (_full, "INV-7: no Retry-After: chat a4"),
    "an odd refusal": (_refused, "INV-7: refused without a reason"),
    "a refused DELETE": (_delete_refused, "INV-8: delete"),
    "a payload of another digest": (_wrong_payload, "INV-9: the payload has another digest"),
    "a payload of other events": (_foreign_payload, "INV-9: no tail of the stream gives"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_is_noticed(lie: str) -> None:
    """One doctored detail of a history, or of a stream, is complained about."""
    story = Story()
    await story.deliver()
    doctor, complaint = LIES[lie]
    doctor(story)
    report = await story.report()
    assert any(problem.startswith(complaint) for problem in report.problems), report.problems


def _other_tokens(sample: Sample) -> None:
    sample.tokens = sample.tokens[::-1]


def _other_mask(sample: Sample) -> None:
    sample.loss_mask = np.ones_like(sample.loss_mask)


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (_other_tokens, "INV-2: the sample's tokens are not the recorded ones"),
        (_other_mask, "INV-2: 8 tokens are trained, which is not what was sampled"),
    ],
)
async def test_an_assembler_that_always_errs_is_noticed(
    harm: Callable[[Sample], None], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are compared with the recorded tokens too: assembling them again gives the same ones."""

    def err(*given: Any, **named: Any) -> Assembly:
        assembly = assemble(*given, **named)
        for sample in assembly.samples:
            harm(sample)
        return assembly

    monkeypatch.setattr(outcome, "assemble", err)
    # The worker would find a mask that does not add up by itself; the checker does not rely on it.
    monkeypatch.setattr(outcome, "_ensure_accounted", lambda *_: None)
    story = Story()
    await story.deliver()
    (problem,) = (await story.report()).problems
    assert problem.startswith(complaint)


async def test_samples_without_an_acknowledged_turn_are_noticed() -> None:
    """A collect must hold every turn that was acknowledged before it began."""
    story = Story()
    await story.deliver(turns=2)
    report = await story.report()
    assert report.problems == [
        f"INV-1: turn 3 was acknowledged, and the samples end at 2: {story.calls[5]} (session {SID})"
    ]


async def test_a_request_that_never_ends_is_noticed() -> None:
    """A request without an outcome is complained about, though no call says so."""
    history = History()
    history.started = 1
    report = await check(history, {}, text_of)
    assert report.problems == ["INV-10: 1 requests never ended"]


async def test_a_session_that_is_gone_is_noticed() -> None:
    """An opened session must be there."""
    story = Story()
    history = History()
    history.calls, history.started = story.calls[:1], 1
    gone = await check(history, {}, text_of)
    empty = await check(history, {SID: Recorded([])}, text_of)
    assert [p[:5] for p in gone.problems + empty.problems] == ["INV-1", "INV-1"]


async def test_what_is_left_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lives for ever by design is none: the queue's own keys, and a child that has gone."""
    monkeypatch.setattr(cluster, "SETTLED_S", 0.1)
    async with fakeredis.FakeAsyncRedis() as client:
        await client.rpush(keys.WAKE, b"1")  # type: ignore[misc]
        await client.zadd(keys.SEALED, {SID: 1.0})
        await client.set(keys.archiving(SID), b"1", ex=60)
        assert await cluster.leftovers(client, {GONE}) == []
        await client.zadd(keys.QUEUE, {"job": 1})
        await client.set("arq:in-progress:job", b"1", ex=60)
        await client.xadd(keys.audit(SID), {"type": "x"})
        await client.rpush(keys.WAKE, *[b"1"] * limits.QUEUE_DEPTH)  # type: ignore[misc]
        problems = await cluster.leftovers(client, {GONE, os.getpid()})
    assert [problem.removeprefix("INV-10: ") for problem in problems] == [
        "left in the queue: [b'job'], [b'arq:queue', b'arq:in-progress:job']",
        f"{keys.audit(SID)} lives for ever",
        "too many wake-up tokens",
        f"orphans: [{os.getpid()}]",
    ]
