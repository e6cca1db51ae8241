"""What a job gives."""

import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.assembler.support import SID, job, opened, record, turn
from tests.support.hooks import everything
from tests.text.models import small_renderer
from tokentape_assembler.counts import Counts
from tokentape_assembler.outcome import MISMATCHES, outcome_of
from tokentape_contracts.accounting import Accounting, LeftOut, Reason
from tokentape_contracts.errors import (
    HookFailed,
    InternalError,
    PrefixBroken,
    ReplayBroken,
    SessionNotFound,
    StoreUnavailable,
    StreamCorrupt,
)
from tokentape_contracts.events import OPENED_ID, ReplaySpec, SessionSealed, TurnRecorded
from tokentape_contracts.samples import decode_samples
from tokentape_core.domain import assemble as assembling
from tokentape_core.domain.replay import Rows, deduplicate, sources
from tokentape_core.domain.state import Turn, fold, turn_id
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks, LeafSample
from tokentape_core.store import Entry, MemoryStore, Store
from tokentape_core.text.render import ChatRenderer, Prompt


def _decode(ids: object) -> str:
    return "".join(f"[{token}]" for token in np.asarray(ids))


async def test_samples_of_a_session() -> None:
    """The payload decodes to the one sample of the path, and its digest is its SHA-256."""
    store = MemoryStore()
    result = await outcome_of(job(await record(store, turns=3)), store, _decode)
    assert result.error is None
    assert result.digest == hashlib.sha256(result.payload).hexdigest()
    assert result.timing_ms.keys() == {"fold", "assemble", "encode"}
    reply = decode_samples(result.payload, contract=2)
    assert len(reply.samples[0]["tokens"]) == 3 * 6
    assert reply.session_metadata["accumulated_token_ids"] == reply.samples[0]["tokens"]


async def test_nothing_after_the_tail_is_seen() -> None:
    """A turn and a DELETE that come after the tail change no byte of the payload."""
    store = MemoryStore()
    asked = job(await record(store, turns=2))
    before = await outcome_of(asked, store, _decode)
    await store.append(SID, 3, turn(3, 12, [1], [2]))
    await store.seal(SID, SessionSealed(id="f" * 32, reason="deleted", sealed_at=9.0))
    after = await outcome_of(asked, store, _decode)
    assert after.payload == before.payload


async def test_a_session_without_turns() -> None:
    """A session without turns gives a payload that says `no_records`."""
    store = MemoryStore()
    await store.open(SID, opened())
    result = await outcome_of(job(OPENED_ID), store, _decode)
    assert decode_samples(result.payload, contract=2).empty_reason == "no_records"


async def test_refusals_are_outcomes() -> None:
    """A broken prefix, a missing tail and a session that is gone give errors, not exceptions."""
    store = MemoryStore()
    await store.open(SID, opened())
    await store.append(SID, 1, turn(1, 0, [1, 2], [3, 4]))
    await store.append(SID, 2, turn(2, 2, [9, 9, 5], [6]))
    broken = await outcome_of(job(turn_id(2)), store, _decode)
    cut = await outcome_of(job(turn_id(3)), store, _decode)
    gone = await outcome_of(job(turn_id(1), sid="other"), store, _decode)
    assert isinstance(broken.error, PrefixBroken)
    assert isinstance(cut.error, StreamCorrupt)
    assert isinstance(gone.error, SessionNotFound)
    assert [result.payload for result in (broken, cut, gone)] == [b"", b"", b""]


async def test_an_outage_is_no_outcome() -> None:
    """What may go well the next time is raised."""

    class Away(MemoryStore):
        async def read(self, *args: Any, **kwargs: Any) -> list[Entry]:
            raise StoreUnavailable("Redis cannot be reached")

    with pytest.raises(StoreUnavailable):
        await outcome_of(job(turn_id(1)), Away(), _decode)


KIND = "routed_experts"
FULL = {KIND: ReplaySpec(rows="full", layers=2, prefix="latest")}
ROWS = np.arange(9 * 2 * 3, dtype=np.int32).reshape(9, 2, 3) * 5


def _recorded(seq: int) -> TurnRecorded:
    """A turn of two prompt tokens and two sampled ones behind those before."""
    return turn(seq, 4 * (seq - 1), [4 * seq, 4 * seq + 1], [4 * seq + 2, 4 * seq + 3])


async def _record_rows(
    store: MemoryStore, *payloads: np.ndarray | None, keep_bytes: Sequence[bool] = (True, True, True)
) -> str:
    """Records turns with these payloads as the recorder does; the id of the last entry."""
    await store.open(SID, opened(replay=FULL))
    for seq, (values, is_kept) in enumerate(zip(payloads, keep_bytes, strict=False), 1):
        event, blobs = _recorded(seq), {}
        state = fold(await store.read(SID))
        assert state is not None
        if values is not None:
            rows = Rows(0, values)
            wanted = [(t.event, KIND) for t in sources(rows, state.head, KIND)]
            blob, data = deduplicate(rows, state.head, KIND, await store.read_blobs(SID, wanted), 1000)
            event = replace(event, replay={KIND: blob})
            blobs = {KIND: data}
        await store.append(SID, seq, event, blobs if is_kept else {})
    return turn_id(len(payloads))


@pytest.mark.parametrize("contract", [1, 2])
async def test_samples_with_replay_rows(contract: int) -> None:
    """Rows that were stored without their repeated prefix are in the payload, each at its token."""
    store = MemoryStore()
    payloads = [ROWS[:3], np.concatenate([ROWS[:1] + 1, ROWS[1:7]])]
    result = await outcome_of(job(await _record_rows(store, *payloads), contract=contract), store, _decode)
    assert result.error is None
    [sample] = decode_samples(result.payload, contract=contract).samples
    assert len(sample["tokens"]) == 8
    assert sample["rollout_routed_experts"].dtype == np.int32
    assert np.array_equal(sample["rollout_routed_experts"], payloads[1])
    assert sample["rollout_indexer_topk"] is None


async def test_equal_rows_give_equal_payloads() -> None:
    """The same events and bytes give the same payload, whoever assembles them (INV-9)."""
    store = MemoryStore()
    asked = job(await _record_rows(store, ROWS[:3], ROWS[:7]))
    first, second = [await outcome_of(asked, store, _decode) for _ in range(2)]
    assert first.payload == second.payload
    assert first.digest == second.digest != ""


async def test_rows_after_the_tail_are_not_read() -> None:
    """Bytes of turns behind the tail, and of an attempt that was given up, may be gone."""
    store = MemoryStore()
    await _record_rows(store, ROWS[:3], ROWS[:7], keep_bytes=(True, False))
    retried = replace(_recorded(3), parent=1, keep=4)
    await store.append(SID, 3, retried)
    for tail, length in ((turn_id(1), 4), (turn_id(3), 4)):
        result = await outcome_of(job(tail), store, _decode)
        assert result.error is None
        [sample] = decode_samples(result.payload, contract=2).samples
        assert len(sample["tokens"]) == length
        assert np.array_equal(sample["rollout_routed_experts"], ROWS[:3])


async def test_rows_that_do_not_fit_are_an_outcome() -> None:
    """A payload of a wrong number of rows is a stored refusal that names turn and rows."""
    store = MemoryStore()
    result = await outcome_of(job(await _record_rows(store, ROWS[:3], ROWS[:5])), store, _decode)
    assert isinstance(result.error, ReplayBroken)
    assert result.error.code == "replay_broken"
    assert result.error.detail == "turn 2: routed_experts has 5 rows from 0 on, 7 are needed"
    assert (result.payload, result.digest) == (b"", "")
    assert result.timing_ms.keys() == {"fold"}


async def test_rows_that_are_gone_are_an_outcome() -> None:
    """Bytes that an event refers to and that nobody has are `stream_corrupt`, never a sample without rows."""
    store = MemoryStore()
    tail = await _record_rows(store, ROWS[:3], ROWS[:7], keep_bytes=(True, False))
    result = await outcome_of(job(tail), store, _decode)
    assert isinstance(result.error, StreamCorrupt)
    assert result.error.code == "stream_corrupt"
    assert "gone" in result.error.detail
    assert (result.payload, result.digest) == (b"", "")


async def test_rows_of_a_wrong_length_are_an_outcome() -> None:
    """Bytes that are too few for what the event says are `stream_corrupt` as well."""

    class Short(MemoryStore):
        async def read_blobs(self, *args: Any) -> dict[tuple[str, str], bytes]:
            return {name: data[:-1] for name, data in (await super().read_blobs(*args)).items()}

    store = Short()
    result = await outcome_of(job(await _record_rows(store, ROWS[:3])), store, _decode)
    assert isinstance(result.error, StreamCorrupt)
    assert result.error.detail.startswith("turn 1: 71 bytes of routed_experts")


async def test_an_outage_between_events_and_rows_is_no_outcome() -> None:
    """If the rows cannot be read now, the job is not answered."""

    class Away(MemoryStore):
        async def read_blobs(self, *args: Any) -> dict[tuple[str, str], bytes]:
            raise StoreUnavailable("Redis cannot be reached")

    store = Away()
    await store.open(SID, opened(replay=FULL))
    await store.append(SID, 1, _recorded(1))
    with pytest.raises(StoreUnavailable):
        await outcome_of(job(turn_id(1)), store, _decode)


THOUGHT = "<think>\n\n</think>\n\n"
"""What the template writes before an answer without reasoning."""
SPOILT: dict[str, dict[str, str]] = {
    "": {},
    "special_token_count": {"sampled": "fi<|endoftext|>ne"},
    "special_token_type": {"sampled": "fine<|box_end|>", "message": "fine<|box_start|>"},
    "non_assistant_text": {"asked": "Hallo"},
    "assistant_text": {"sampled": "good"},
}
"""Type of mismatch → in what a turn differs from its messages, `Hello` and `fine`."""


class Conversation:
    """A session with a real template, whose turns say something else than their messages where they shall."""

    def __init__(self, store: Store) -> None:
        self.renderer = small_renderer()
        self._store = store

    async def open(self, mode: str) -> None:
        await self._store.open(SID, opened(mode=mode, template=self.renderer.fingerprint))

    async def say(self, parent: int, mismatch: str = "") -> str:
        """Records a turn behind this one (0: as a root), with a mismatch of this type; its id."""
        state = fold(await self._store.read(SID))
        assert state is not None
        seq, before = len(state.turns) + 1, state.turns[parent - 1] if parent else None
        spoilt = SPOILT[mismatch]
        asked = [{"role": "user", "content": spoilt.get("asked", "Hello")}]
        if before is None:
            prompt = Prompt(0, self.renderer.render(asked))
        else:
            prompt = self.renderer.extend(before.tokens, before.event.messages[-1], asked)
        sampled = self.renderer.tokenizer.encode(f"{THOUGHT}{spoilt.get('sampled', 'fine')}<|im_end|>")
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": spoilt.get("message", "fine")},
        ]
        event = turn(seq, prompt.keep, prompt.suffix.tolist(), sampled)
        await self._store.append(SID, seq, replace(event, parent=parent, messages=messages))
        return turn_id(seq)


@pytest.mark.parametrize("mode", ["linear", "tree"])
@pytest.mark.parametrize("mismatch", [*MISMATCHES, ""])
async def test_a_mismatch_is_counted_under_its_type(mode: str, mismatch: str) -> None:
    """A turn that differs from its messages in one way counts once, under that; a faithful one nowhere."""
    session = Conversation(store := MemoryStore())
    await session.open(mode)
    result = await outcome_of(job(await session.say(0, mismatch)), store, _decode, renderer=session.renderer)
    assert result.counts.mismatches == ({mismatch: 1} if mismatch else {})


async def _forked(mode: str) -> tuple[MemoryStore, ChatRenderer, str]:
    """Turn 1 with two children, of which 3 is the newer, and behind that 4; the id of the last."""
    session = Conversation(store := MemoryStore())
    await session.open(mode)
    await session.say(0, "assistant_text")
    await session.say(1, "special_token_type")
    await session.say(1, "assistant_text")
    return store, session.renderer, await session.say(3, "special_token_count")


async def test_a_sum_that_is_not_right_is_a_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker counts again from events and samples; what does not add up is never a sample."""
    wrong = Accounting(1, 3, 2, [LeftOut(1, 1, Reason.TRIMMED)])
    monkeypatch.setattr(assembling, "account", lambda *_: wrong)
    store = MemoryStore()
    with pytest.raises(InternalError, match="tokens were sampled"):
        await outcome_of(job(await record(store, turns=1)), store, _decode)


async def test_a_hook_that_leaves_no_json_is_refused() -> None:
    """A reward of NaN would come back as none: that is the hook's fault and no defect of ours."""

    def finish(samples: Sequence[LeafSample], metadata: object) -> None:
        samples[0].sample.reward = float("nan")

    store = MemoryStore()
    await store.open(SID, opened(mode="tree"))
    await store.append(SID, 1, replace(turn(1, 0, [1, 2], [3, 4]), parent=0))
    result = await outcome_of(job(turn_id(1)), store, _decode, Hooks(DEFAULT_HOOKS.pick, finish))
    assert isinstance(result.error, HookFailed)
    assert "reward of sample 0 holds nan" in result.error.detail


def _cycle() -> dict[str, Any]:
    loop: dict[str, Any] = {"list": []}
    loop["list"].append(loop)
    return loop


def _doubled(times: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(times):
        value = [value, value]
    return value


def _many_cycles() -> list[Any]:
    """Whoever follows it one list at a time runs out of memory long before it has seen too many values."""
    value: list[Any] = []
    value += [value] * 100_000
    return value


@dataclass
class _Nan:
    value: float = float("nan")


def _nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "left",
    [
        *(float("nan"), float("inf"), np.float64("nan"), 2**64, -(2**64), 10**400, 1j, object(), {1, 2}),
        *("\ud800", {"\udfff": 1}, {1: "key"}, {None: 1}, {(1, 2): 3}, b"bytes", _cycle(), _doubled(200)),
        *(_nested(300), _nested(100_000), np.array([1.0, 2j]), [float("nan")] * 3, range(3), print),
        *(np.array([1.0, np.nan]), np.array([np.inf], np.float16), np.longdouble(1), _Nan(), _many_cycles()),
    ],
    ids=lambda left: str(type(left).__name__),
)
async def test_metadata_that_json_cannot_carry(left: Any) -> None:
    """It is the finish hook's fault, and known at once."""

    def finish(samples: Sequence[LeafSample], metadata: object) -> None:
        samples[0].sample.metadata["left"] = left

    store = MemoryStore()
    await store.open(SID, opened(mode="tree"))
    await store.append(SID, 1, replace(turn(1, 0, [1, 2], [3, 4]), parent=0))
    began = time.monotonic()
    result = await outcome_of(job(turn_id(1)), store, _decode, Hooks(DEFAULT_HOOKS.pick, finish))
    assert isinstance(result.error, HookFailed), result.error
    assert "finish hook tests.assembler.test_outcome.test_metadata_" in result.error.detail
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    ("field", "left"),
    [
        *(("loss_mask", left) for left in (None, 5, "11", ["1", "1"], [None, {}], np.ones((2, 2)), [2, 2])),
        *(("rollout_log_probs", left) for left in (None, "x", [10**400, 1], [[-1.0], [-1.0]], [np.nan, 0])),
        *(("response_length", left) for left in (None, "2", 2.0, [1], float("nan"), 10**30, -2)),
        *(("tokens", left) for left in (None, 5, [2**64, 2, 3, 4], [-1, 2, 3, 4], ["a"] * 4)),
        *(("metadata", left) for left in (None, [], "x")),
        *(("reward", left) for left in (object(), 2**70, np.float32("inf"), _cycle())),
        *(("status", "completed"), ("response", "\ud800"), ("rollout_routed_experts", "x")),
    ],
    ids=lambda value: f"{value!r:.20}",
)
async def test_fields_that_a_sample_cannot_hold(field: str, left: Any) -> None:
    """Whatever a finish hook leaves where a field belongs, its name stands in the refusal."""

    def finish(samples: Sequence[LeafSample], metadata: object) -> None:
        setattr(samples[0].sample, field, left)

    await _refused(Hooks(DEFAULT_HOOKS.pick, finish))


@pytest.mark.parametrize(
    "raised", [ValueError("\ud800"), SystemExit(3), RecursionError("deep"), StopIteration(), UserWarning()]
)
async def test_a_hook_that_raises(raised: BaseException) -> None:
    """Whatever it raises; what it says can be told."""

    def hook(*_: object) -> Any:
        raise raised

    await _refused(Hooks(hook, DEFAULT_HOOKS.finish))
    await _refused(Hooks(DEFAULT_HOOKS.pick, hook))


@pytest.mark.parametrize("seq", [1, 2, [], None])
async def test_a_leaf_of_the_hooks_own(seq: Any) -> None:
    """A pick hook returns leaves that it was given, and nothing that looks like one."""

    def hook(_: object) -> Any:
        return [SimpleNamespace(turn=SimpleNamespace(seq=seq))]

    await _refused(Hooks(hook, DEFAULT_HOOKS.finish))


async def _refused(hooks: Hooks) -> None:
    """The hook is named, and the refusal can be stored."""
    store = MemoryStore()
    await store.open(SID, opened(mode="tree"))
    await store.append(SID, 1, replace(turn(1, 0, [1, 2], [3, 4]), parent=0))
    result = await outcome_of(job(turn_id(1)), store, _decode, hooks)
    assert isinstance(result.error, HookFailed), result.error
    assert "hook tests.assembler.test_outcome.test_" in result.error.detail
    assert dict(result.to_hash())


async def test_mismatches_of_a_hooks_own() -> None:
    """A hook that puts something else where the mismatches stand is no failure; nothing is counted."""
    for left in (5, [5], [{"type": 5}], [{"type": [1]}], [{"type": np.array([1, 2])}]):

        def finish(samples: Sequence[LeafSample], metadata: object, left: Any = left) -> None:
            samples[0].sample.metadata["tito_session_mismatch"] = left

        store = MemoryStore()
        await store.open(SID, opened(mode="tree"))
        await store.append(SID, 1, replace(turn(1, 0, [1, 2], [3, 4]), parent=0))
        result = await outcome_of(job(turn_id(1)), store, _decode, Hooks(DEFAULT_HOOKS.pick, finish))
        assert result.error is None
        assert result.counts.mismatches == {}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"logprobs": np.array([-0.5, np.nan])}, "log-prob nan"),
        ({"logprobs": np.array([0.5, -0.5])}, "log-prob 0.5"),
        ({"output": np.array([4, -4], np.int32)}, "has the id -4"),
        ({"suffix": np.array([-1, 2], np.int32)}, "has the id -1"),
    ],
)
async def test_an_impossible_stream_is_corrupt(changes: dict[str, Any], text: str) -> None:
    """Tokens that no recorder writes were changed in the stream: a refusal, and no sample of them."""
    store = MemoryStore()
    await store.open(SID, opened())
    await store.append(SID, 1, replace(turn(1, 0, [1, 2], [3, 4]), **changes))
    result = await outcome_of(job(turn_id(1)), store, _decode)
    assert isinstance(result.error, StreamCorrupt)
    assert text in result.error.detail


async def _turns(store: MemoryStore) -> Sequence[Turn]:
    state = fold(await store.read(SID))
    assert state is not None
    return state.turns


def _fates(turns: Sequence[Turn], left_out: Mapping[int, Reason]) -> dict[str, int]:
    """Sampled tokens by fate, if these turns are left out whole and all others trained."""
    fates = Counter({"trained": 0})
    for node in turns:
        fates[left_out.get(node.seq, "trained")] += len(node.event.output)
    return dict(fates)


async def test_counts_of_a_linear_session() -> None:
    """Only the path to the newest turn is compared; a retried turn is a dropped leaf."""
    store, renderer, tail = await _forked("linear")
    result = await outcome_of(job(tail), store, _decode, renderer=renderer)
    assert result.counts == Counts(
        samples={"completed": 1},
        picked=1,
        dropped=1,
        tokens=_fates(await _turns(store), {2: Reason.RETRIED}),
        mismatches={"assistant_text": 2, "special_token_count": 1},
    )


@pytest.mark.parametrize("keeps_all", [False, True], ids=["default", "everything"])
async def test_counts_of_a_tree(keeps_all: bool) -> None:
    """The path of every sample is compared, a turn that two share in both; the other leaves are dropped."""
    store, renderer, _ = await _forked("tree")
    session = Conversation(store)
    tail = await session.say(0, "non_assistant_text")
    hooks = Hooks(everything if keeps_all else DEFAULT_HOOKS.pick, DEFAULT_HOOKS.finish)
    result = await outcome_of(job(tail), store, _decode, hooks, renderer)
    once = {"assistant_text": 2, "special_token_count": 1, "non_assistant_text": 1}
    turns = await _turns(store)
    tokens = _fates(turns, {2: Reason.RETRIED})
    expected = Counts(samples={"completed": 2}, picked=2, dropped=1, tokens=tokens, mismatches=once)
    if keeps_all:
        twice = {**once, "assistant_text": 3, "special_token_type": 1}
        expected = Counts(
            samples={"completed": 3}, picked=3, dropped=0, tokens=_fates(turns, {}), mismatches=twice
        )
    assert result.counts == expected


@pytest.mark.parametrize(
    "left", [None, True, 7, "assistant_text", {"type": "x"}, [1, {"type": "x"}, {"type": [1]}]]
)
async def test_what_a_finish_hook_leaves_is_no_mismatch(left: Any) -> None:
    """Where a hook has put something of its own, nothing is counted and nothing fails."""

    def finish(samples: Sequence[LeafSample], metadata: object) -> None:
        for item in samples:
            item.sample.metadata["tito_session_mismatch"] = left

    store, renderer, tail = await _forked("tree")
    hooks = Hooks(DEFAULT_HOOKS.pick, finish)
    result = await outcome_of(job(tail), store, _decode, hooks, renderer)
    assert result.error is None
    tokens = _fates(await _turns(store), {2: Reason.RETRIED})
    assert result.counts == Counts(samples={"completed": 1}, picked=1, dropped=1, tokens=tokens)


async def test_samples_are_counted_by_status() -> None:
    """Each sample counts under its status; a picked leaf that is too long is none."""
    store = MemoryStore()
    await store.open(SID, opened(mode="tree"))
    endings = ["stop", "length", "tool_calls", "abort", "stop", "length", "burnt"]
    for seq, finish in enumerate(endings, 1):
        await store.append(SID, seq, replace(turn(seq, 0, [1, 10 + seq], [3, seq]), parent=0, finish=finish))
    await store.append(SID, 8, replace(turn(8, 0, [1, 2, 3, 4, 5], [6]), parent=0))
    result = await outcome_of(job(turn_id(8), max_seq_len=4), store, _decode)
    statuses = {"completed": 3, "truncated": 2, "aborted": 1, "failed": 1}
    tokens = {"trained": 14, "over_max_seq_len": 1}
    assert result.counts == Counts(samples=statuses, picked=8, tokens=tokens)


@pytest.mark.parametrize(
    ("recorded", "tail", "lost"), [(2, 2, 0), (2, 3, 1), (2, 5, 3), (0, 0, 0), (0, 2, 2), (None, 3, 3)]
)
async def test_lost_turns_are_counted(recorded: int | None, tail: int, lost: int) -> None:
    """As many as the stream, or what is gone with it, lacks up to the tail; then there are no samples."""
    store = MemoryStore()
    if recorded is not None:
        await record(store, turns=recorded)
    result = await outcome_of(job(turn_id(tail) if tail else OPENED_ID), store, _decode)
    assert result.counts.lost == lost
    assert (result.error is None) == (lost == 0)


async def test_a_refusal_for_another_reason_loses_nothing() -> None:
    """A prefix that is broken is not a turn that is gone."""
    store = MemoryStore()
    await record(store, turns=1)
    await store.append(SID, 2, turn(2, 2, [9], [6]))
    result = await outcome_of(job(turn_id(2)), store, _decode)
    assert isinstance(result.error, PrefixBroken)
    assert result.counts == Counts()
