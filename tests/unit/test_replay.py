"""Routing replay rows: what is asked for, what is stored, what is restored, and what a sample gets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.hooks import everything
from tests.support.sessions import opened, state_of, turn
from tokentape_contracts.errors import ReplayBroken, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, Blob, ReplaySpec
from tokentape_contracts.samples import Sample
from tokentape_core.domain.assemble import Assembly, assemble, replay_turns
from tokentape_core.domain.replay import Rows, chain, deduplicate, first_row, restore, sources
from tokentape_core.domain.state import SessionState, Turn, apply, turn_id
from tokentape_core.domain.tree import DEFAULT_HOOKS, Hooks

EXPERTS, INDEXER = "routed_experts", "indexer_topk"
FULL = ReplaySpec(rows="full", layers=None, prefix="latest")
RECORDED = ReplaySpec(rows="full", layers=None, prefix="recorded")
INCREMENTAL = ReplaySpec(rows="incremental", layers=None, prefix="latest")
PART_BYTES = 8
"""Two rows of `_rows` in one byte each."""


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """The smallest dtype that a payload may have, as an engine adapter gives it."""
    for dtype in (np.uint8, np.uint16):
        if not values.size or (values.min() >= 0 and values.max() <= np.iinfo(dtype).max):
            return values.astype(dtype)
    return values.astype(np.int32)


def _rows(*numbers: int) -> NDArray[Any]:
    """One row of 2 layers × 2 for each number, from which it can be told."""
    return _narrow(np.array([[[n, 1], [2, n]] for n in numbers], np.int64).reshape(-1, 2, 2))


def _numbers(values: NDArray[Any] | None) -> list[int] | None:
    """The inverse of `_rows`, for int32 rows of a sample."""
    if values is None:
        return None
    numbers: list[int] = values[:, 0, 0].tolist()
    assert values.dtype == np.int32
    assert np.array_equal(values, _rows(*numbers))
    return numbers


def _full(*numbers: int) -> Rows:
    return Rows(0, _rows(*numbers))


def _from(start: int, *numbers: int) -> Rows:
    return Rows(start, _rows(*numbers))


class Session:
    """A session of which the recorder's part is played: it stores what is new of each payload."""

    def __init__(self, spec: ReplaySpec = FULL, mode: str = "linear", **others: ReplaySpec) -> None:
        replay = {EXPERTS: spec, **others}
        self.state: SessionState = apply(None, OPENED_ID, opened(mode=mode, replay=replay))
        self.stored: dict[tuple[str, str], bytes] = {}
        self._tokens = 0

    def record(
        self,
        keep: int,
        suffix: int,
        output: int,
        experts: Rows | None = None,
        indexer: Rows | None = None,
        parent: int | None = None,
        **fields: Any,
    ) -> Turn:
        """Records a turn of so many tokens, none of which was there before; it continues the newest."""
        seq = len(self.state.turns) + 1
        parent_seq = seq - 1 if parent is None else parent
        first, self._tokens = self._tokens, self._tokens + suffix + output
        ids = list(range(first, self._tokens))
        event = turn(parent=parent_seq, keep=keep, suffix=ids[:suffix], output=ids[suffix:], **fields)
        at = self.state.turns[parent_seq - 1] if parent_seq else None
        sent = {kind: rows for kind, rows in ((EXPERTS, experts), (INDEXER, indexer)) if rows is not None}
        replay = {}
        for kind, rows in sent.items():
            known = {(t.event.id, kind): self.stored[t.event.id, kind] for t in sources(rows, at, kind)}
            replay[kind], self.stored[event.id, kind] = deduplicate(rows, at, kind, known, PART_BYTES)
        self.state = apply(self.state, turn_id(seq), replace(event, replay=replay))
        return self.state.turns[-1]

    def assemble(self, max_seq_len: int | None = None, hooks: Hooks = DEFAULT_HOOKS) -> Assembly:
        return assemble(self.state, lambda ids: "", max_seq_len=max_seq_len, hooks=hooks, stored=self.stored)

    def sample(self, max_seq_len: int | None = None) -> Sample:
        """The one sample, which has a row for each token but the last, or none at all."""
        [sample] = self.assemble(max_seq_len).samples
        for rows in (sample.rollout_routed_experts, sample.rollout_indexer_topk):
            assert rows is None or len(rows) == len(sample.tokens) - 1
        return sample

    def experts(self, max_seq_len: int | None = None) -> list[int] | None:
        return _numbers(self.sample(max_seq_len).rollout_routed_experts)


# What the engine is asked for


@pytest.mark.parametrize(
    ("keep", "row"), [(4, 3), (3, 3), (2, 2)], ids=["all", "one token trimmed", "two tokens trimmed"]
)
def test_incremental_rows_begin_where_the_parents_end(keep: int, row: int) -> None:
    """The first row is that of the parent's last token, which was only sampled, or of the first trimmed."""
    parent = state_of(turn(suffix=[1, 2], output=[3, 4])).head
    assert first_row(INCREMENTAL, parent, keep) == row
    assert first_row(FULL, parent, keep) == first_row(RECORDED, parent, keep) == 0


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_a_conversation_begins_with_row_0(spec: ReplaySpec) -> None:
    """Without a parent every row is asked for."""
    assert first_row(spec, None, 0) == 0


@pytest.mark.parametrize("keep", [1, 0])
def test_a_parent_of_one_token_has_no_row(keep: int) -> None:
    """Its only token was read by nobody, so its child is asked for row 0, never for a row before it."""
    parent = state_of(turn(suffix=[1], output=[])).head
    assert first_row(INCREMENTAL, parent, keep) == 0


# What is stored


def test_a_payload_that_begins_like_its_parents_stores_new_rows_only() -> None:
    """Only the rows after the parent's are stored; the blob says how many the engine sent."""
    session = Session()
    one = session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2, _full(1, 2, 3, 4, 5, 6))
    shape = {"start": 0, "layers": 2, "topk": 2, "dtype": "u1"}
    assert one.event.replay[EXPERTS] == Blob(rows=3, stored=((0, 3),), parts=2, **shape)
    assert two.event.replay[EXPERTS] == Blob(rows=6, stored=((3, 3),), parts=2, **shape)
    assert session.stored[one.event.id, EXPERTS] == _rows(1, 2, 3).tobytes()
    assert session.stored[two.event.id, EXPERTS] == _rows(4, 5, 6).tobytes()


# child's payload on top of the parent's 1 2 3 → runs that are stored, and their rows
STORED: dict[str, tuple[Rows, tuple[tuple[int, int], ...], list[int]]] = {
    "one row of the prefix changed": (_full(1, 9, 3, 4), ((1, 1), (3, 1)), [9, 4]),
    "the first row changed": (_full(9, 2, 3, 4), ((0, 1), (3, 1)), [9, 4]),
    "the last row of the prefix changed": (_full(1, 2, 9, 4), ((2, 2),), [9, 4]),
    "several runs": (_full(9, 2, 8, 4, 5), ((0, 1), (2, 3)), [9, 8, 4, 5]),
    "everything changed": (_full(7, 8, 9, 4), ((0, 4),), [7, 8, 9, 4]),
    "equal rows at other positions": (_full(2, 3, 1, 1), ((0, 4),), [2, 3, 1, 1]),
    "zero new rows": (_full(1, 2, 3), (), []),
    "shorter than the parent's": (_full(1, 2), (), []),
    "shorter, and changed": (_full(1, 9), ((1, 1),), [9]),
    "new rows only, as asked for": (_from(3, 4, 5), ((3, 2),), [4, 5]),
    "new rows only, equal to the parent's first": (_from(3, 1, 2), ((3, 2),), [1, 2]),
    "a wider row of the prefix": (_full(1, 300, 3), ((1, 1),), [300]),
    "a wider new row": (_full(1, 2, 3, 300), ((3, 1),), [300]),
    "a negative row": (_full(1, 2, -1), ((2, 1),), [-1]),
}


@pytest.mark.parametrize("case", STORED)
def test_a_row_is_stored_if_it_differs_from_the_parents(case: str) -> None:
    """Exactly the rows that the parent has not at their positions are stored, in ascending runs."""
    sent, runs, numbers = STORED[case]
    session = Session()
    session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2, sent)
    blob = two.event.replay[EXPERTS]
    data = session.stored[two.event.id, EXPERTS]
    assert (blob.start, blob.rows, blob.stored) == (sent.start, len(sent.values), runs)
    assert np.array_equal(np.frombuffer(data, f"<{blob.dtype}"), _rows(*numbers).ravel())
    assert blob.parts == -(-len(data) // PART_BYTES)
    restored = restore(two, EXPERTS, session.stored)
    assert restored is not None
    assert restored.start == sent.start
    assert np.array_equal(restored.values, sent.values)


def test_one_number_of_a_row_is_a_difference() -> None:
    """A row is stored again whichever of its layers and choices changed."""
    session = Session()
    session.record(0, 2, 2, _full(1, 2, 3))
    for layer, choice in np.ndindex(2, 2):
        values = _rows(1, 2, 3)
        values[1, layer, choice] += 1
        retry = session.record(4, 1, 2, Rows(0, values), parent=1)
        assert retry.event.replay[EXPERTS].stored == ((1, 1),)


@pytest.mark.parametrize("shape", [(6, 2, 3), (6, 3, 2), (6, 1, 4), (6, 4, 1)], ids=str)
def test_rows_of_another_shape_are_all_stored(shape: tuple[int, int, int]) -> None:
    """Layers or top-k that changed leave nothing to compare, even where the bytes would be the same."""
    session = Session()
    session.record(0, 2, 2, Rows(0, np.zeros((3, 2, 2), np.uint8)))
    two = session.record(4, 1, 2, Rows(0, np.zeros(shape, np.uint8)))
    assert two.event.replay[EXPERTS].stored == ((0, 6),)
    assert chain(two, EXPERTS) == [two]
    restored = restore(two, EXPERTS, session.stored)
    assert restored is not None
    assert restored.values.shape == shape


def test_a_parent_without_a_payload_leaves_nothing_to_compare() -> None:
    """Neither its own parent's payload nor one of another kind is compared with."""
    session = Session(indexer_topk=FULL)
    session.record(0, 2, 2, _full(1, 2, 3), _full(1, 2, 3))
    session.record(4, 1, 2, None, _full(1, 2, 3, 4, 5, 6))
    three = session.record(7, 1, 1, _full(1, 2, 3, 4, 5, 6, 7, 8), _full(1, 2, 3, 4, 5, 6, 7, 8))
    assert three.event.replay[EXPERTS].stored == ((0, 8),)
    assert three.event.replay[INDEXER].stored == ((6, 2),)


def test_a_parents_payload_that_begins_later_is_not_compared() -> None:
    """Positions would not be the same."""
    session = Session(INCREMENTAL)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _from(3, 4, 5, 6))
    three = session.record(7, 1, 1, _full(4, 5, 6, 4, 5, 6, 7, 8))
    assert three.event.replay[EXPERTS].stored == ((0, 8),)


def test_an_empty_payload_stores_nothing() -> None:
    """A payload without rows has no parts, and is restored as one without rows."""
    session = Session()
    one = session.record(0, 1, 0, Rows(0, np.empty((0, 2, 2), np.uint8)))
    blob = one.event.replay[EXPERTS]
    assert (blob.rows, blob.stored, blob.parts) == (0, (), 0)
    assert session.stored[one.event.id, EXPERTS] == b""
    restored = restore(one, EXPERTS, {})
    assert restored is not None
    assert restored.values.shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("length", "parts"), [(2, 1), (3, 2), (4, 2), (5, 3)], ids=["exact", "one over", "two", "three"]
)
def test_parts_hold_the_bytes(length: int, parts: int) -> None:
    """The blob counts as many parts as its stored bytes fill."""
    blob, data = deduplicate(_full(*range(length)), None, EXPERTS, {}, PART_BYTES)
    assert (blob.parts, len(data)) == (parts, 4 * length)


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<u2", ">u2"])
@pytest.mark.parametrize("view", [np.asfortranarray, lambda a: a[::-1].copy()[::-1], lambda a: a])
def test_bytes_are_little_endian_in_any_memory_order(dtype: str, view: Any) -> None:
    """What is stored depends on the values only."""
    values = np.arange(12).astype(dtype).reshape(3, 2, 2)
    blob, data = deduplicate(Rows(0, view(values)), None, EXPERTS, {}, 1000)
    assert blob.dtype == dtype[1:]
    assert data == np.arange(12).astype(f"<{dtype[1:]}").tobytes()


# What is restored

MIXED = [
    [1, 2, 3],
    [1, 300, 3, 4, 5, 6],
    [1, 300, 3, -1, 5, 6, 7, 70_000],
    [1, 2, 3, 4, 5, 6, 7, 70_000, 9],
    [9, 2, 3, 4, 5, 6, 255, 70_000, 256, 10],
]
"""Payloads of five turns in a row; the numbers need one byte, two, four, four and four."""


def _five(session: Session) -> list[tuple[Turn, Rows]]:
    """A chain of five turns, and a sibling of each but the first, whose payload differs in its last row."""
    lengths = [(0, 2, 2), (4, 1, 2), (7, 1, 1), (9, 1, 0), (10, 0, 1)]
    recorded: list[tuple[Turn, Rows]] = []
    parent = 0
    for (keep, suffix, output), numbers in zip(lengths, MIXED, strict=True):
        if parent:
            aside = _full(*numbers[:-1], 77)
            recorded.append((session.record(keep, suffix, output, aside, parent=parent), aside))
        sent = _full(*numbers)
        recorded.append((session.record(keep, suffix, output, sent, parent=parent), sent))
        parent = recorded[-1][0].seq
    return recorded


def test_every_payload_of_a_chain_is_restored() -> None:
    """Five turns with siblings, rows that flip back and forth, and wider numbers: each payload comes back."""
    session = Session(mode="tree")
    recorded = _five(session)
    assert [len(t.path) for t, _ in recorded] == [1, 2, 2, 3, 3, 4, 4, 5, 5]
    for at, sent in recorded:
        needed = {(t.event.id, EXPERTS): session.stored[t.event.id, EXPERTS] for t in chain(at, EXPERTS)}
        restored = restore(at, EXPERTS, needed)
        assert restored is not None
        assert restored.start == 0
        assert restored.values.dtype.str[1:] in ("u1", "u2", "i4")
        assert np.array_equal(restored.values, sent.values)


def test_a_payload_is_restored_from_any_row_on() -> None:
    """`first` leaves out the rows before it and nothing else."""
    session = Session(mode="tree")
    for at, sent in _five(session):
        for first in range(len(sent.values) + 1):
            restored = restore(at, EXPERTS, session.stored, first)
            assert restored is not None
            assert restored.start == first
            assert np.array_equal(restored.values, sent.values[first:])


@pytest.mark.parametrize(
    "payloads",
    [
        [[1, 2, 3], [1, 300, 3], [1, 300, -3]],
        [[1, 2, -3], [1, 2, 3], [1, 300, 3]],
        [[1, 300, 65_535], [1, 2, 65_536], [1, 2, 65_535]],
        [[2**31 - 1, -(2**31), 0], [255, -(2**31), 0], [255, 256, 0]],
    ],
    ids=["u1 u2 i4", "i4 u1 u2", "u2 i4 u2", "i4 i4 u2"],
)
def test_dtypes_may_change_from_turn_to_turn(payloads: list[list[int]]) -> None:
    """Rows come back with their numbers though those that turns share are stored wider or narrower."""
    session = Session()
    session.record(0, 2, 2, _full(*payloads[0]))
    for numbers in payloads[1:]:
        session.record(4, 0, 0, _full(*numbers))
    for at, numbers in zip(session.state.turns, payloads, strict=True):
        restored = restore(at, EXPERTS, session.stored)
        assert restored is not None
        assert np.array_equal(restored.values, _rows(*numbers))


def test_a_turn_without_a_payload_restores_none() -> None:
    """None, not an empty payload, whatever its parent has; and it needs no bytes."""
    session = Session()
    session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2)
    assert restore(two, EXPERTS, {}) is None
    assert restore(two, INDEXER, {}) is None
    assert chain(two, EXPERTS) == []


def test_a_chain_goes_back_to_where_everything_is_stored() -> None:
    """Turns above the one that stores its whole payload are not read; nor is any for incremental rows."""
    session = Session()
    one = session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2, _full(1, 2, 3, 4, 5, 6))
    three = session.record(7, 1, 1, _full(9, 9, 9, 9, 9, 9, 9, 9))
    four = session.record(9, 1, 0, _full(9, 9, 9, 9, 9, 9, 9, 9, 10))
    assert chain(one, EXPERTS) == [one]
    assert chain(two, EXPERTS) == [one, two]
    assert chain(three, EXPERTS) == [three]
    assert chain(four, EXPERTS) == [three, four]
    assert sources(_full(1), four, EXPERTS) == [three, four]
    assert sources(_from(1, 1), four, EXPERTS) == []
    assert sources(_full(1), None, EXPERTS) == []


DAMAGES: dict[str, Any] = {
    "missing": lambda data: b"",
    "a byte short": lambda data: data[:-1],
    "a row short": lambda data: data[:-8],
    "a byte long": lambda data: data + b"x",
    "a row long": lambda data: data + data[:8],
    "twice": lambda data: data * 2,
}


@pytest.mark.parametrize("first", [None, 4])
@pytest.mark.parametrize("damage", DAMAGES)
def test_stored_bytes_of_a_wrong_length_are_corrupt(damage: str, first: int | None) -> None:
    """Too few or too many bytes are an error that names the turn which they belong to, and the kind."""
    session = Session()
    session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2, _full(1, 2, 3, 4, 500, 6))
    three = session.record(7, 1, 1, _full(1, 2, 3, 4, 500, 6, 7, 8))
    session.stored[two.event.id, EXPERTS] = DAMAGES[damage](session.stored[two.event.id, EXPERTS])
    for at in (two, three):
        with pytest.raises(StreamCorrupt, match=r"^turn 2: \d+ bytes of routed_experts"):
            restore(at, EXPERTS, session.stored, first)
    with pytest.raises(StreamCorrupt, match=r"^turn 2: .* instead of 3 rows of 2 × 2 u2"):
        session.assemble()


def test_bytes_that_were_not_read_are_corrupt() -> None:
    """Without the bytes of one turn of the chain its rows are not made up."""
    session = Session()
    one = session.record(0, 2, 2, _full(1, 2, 3))
    two = session.record(4, 1, 2, _full(1, 2, 3, 4, 5, 6))
    del session.stored[one.event.id, EXPERTS]
    with pytest.raises(StreamCorrupt, match=r"^turn 1: 0 bytes of routed_experts"):
        restore(two, EXPERTS, session.stored)
    assert restore(two, EXPERTS, session.stored, 3).values.tolist() == _rows(4, 5, 6).tolist()  # type: ignore[union-attr]


def test_a_row_that_no_turn_stored_is_corrupt() -> None:
    """A blob that refers to a parent's row which is not there is an error that names row and kind."""
    blob = Blob(start=0, rows=3, layers=2, topk=2, dtype="u1", stored=((0, 1),), parts=1)
    one = turn(replay={EXPERTS: blob})
    two = turn(parent=1, keep=4, suffix=[5], output=[6], replay={EXPERTS: replace(blob, rows=5)})
    state = state_of(one, two, first=opened(replay={EXPERTS: FULL}))
    stored = {(event.id, EXPERTS): _rows(1).tobytes() for event in (one, two)}
    for at in state.turns:
        with pytest.raises(
            StreamCorrupt, match=rf"^turn {at.seq}: row 1 of routed_experts is stored nowhere"
        ):
            restore(at, EXPERTS, stored)


# What a sample gets


def test_the_last_turns_rows_are_the_samples() -> None:
    """`latest`: rows that a later prefill flipped are those of the last merged turn."""
    session = Session(FULL)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _full(10, 2, 30, 4, 5, 6))
    session.record(7, 1, 1, _full(100, 2, 30, 40, 5, 60, 7, 8))
    assert session.experts() == [100, 2, 30, 40, 5, 60, 7, 8]


def test_a_row_stays_as_it_was_recorded() -> None:
    """`recorded`: each row is that of the turn which first read its token, whatever later turns sent."""
    session = Session(RECORDED)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _full(10, 2, 30, 4, 5, 6))
    session.record(7, 1, 1, _full(100, 2, 30, 40, 5, 60, 7, 8))
    assert session.experts() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(("trimmed", "expected"), [(1, [1, 2, 3, 4, 50, 60]), (2, [1, 2, 3, 40, 50])])
def test_recorded_rows_of_trimmed_tokens_come_from_their_new_turn(trimmed: int, expected: list[int]) -> None:
    """What a prompt rendered anew was first read by its own turn; rows of the tokens kept stay."""
    session = Session(RECORDED)
    session.record(0, 2, 3, _full(1, 2, 3, 4))
    session.record(5 - trimmed, 2, 1, _full(*[10, 20, 30, 40, 50, 60, 70][: 7 - trimmed]))
    assert session.experts() == expected


def test_new_rows_are_put_together() -> None:
    """Incremental rows of the merged turns stand one after the other."""
    session = Session(INCREMENTAL)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _from(3, 4, 500, 6))
    session.record(7, 1, 1, _from(6, 7, -8))
    assert session.experts() == [1, 2, 3, 4, 500, 6, 7, -8]


@pytest.mark.parametrize(
    ("trimmed", "new", "expected"),
    [
        (2, _from(3, 30, 40, 50), [1, 2, 3, 30, 40, 50]),
        (1, _from(4, 40, 50, 60), [1, 2, 3, 4, 40, 50, 60]),
        (0, _from(4, 40, 50, 60, 70), [1, 2, 3, 4, 40, 50, 60, 70]),
    ],
)
def test_incremental_rows_begin_with_the_first_replaced_token(
    trimmed: int, new: Rows, expected: list[int]
) -> None:
    """The rows of tokens that were rendered anew are the new turn's, the kept ones' are the parent's."""
    session = Session(INCREMENTAL)
    session.record(0, 2, 3, _full(1, 2, 3, 4))
    two = session.record(5 - trimmed, 3, 1, new)
    assert new.start == first_row(INCREMENTAL, two.parent, two.event.keep)
    assert session.experts() == expected


def test_the_whole_answer_may_be_replaced() -> None:
    """A trim as deep as the output leaves rows of the prompt only."""
    session = Session(INCREMENTAL)
    session.record(0, 3, 2, _full(1, 2, 3, 4))
    session.record(3, 1, 2, _from(3, 30, 40))
    session.record(4, 1, 1, _from(4, 400))
    assert session.experts() == [1, 2, 3, 30, 400]


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_without_any_payload_a_sample_has_none(spec: ReplaySpec) -> None:
    """An engine that never sends rows gives samples without the tensor, and all turns are merged."""
    session = Session(spec)
    session.record(0, 2, 2)
    session.record(4, 1, 2)
    assert session.experts() is None
    assert len(session.sample().tokens) == 7


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_a_sample_of_one_token_has_no_rows(spec: ReplaySpec) -> None:
    """Nothing was read for a token that has no successor."""
    session = Session(spec)
    session.record(0, 1, 0)
    assert session.experts() is None
    session.record(1, 0, 1, _full(5))
    assert session.experts() == [5]


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_a_sample_that_is_cut_down_to_one_token_has_no_rows(spec: ReplaySpec) -> None:
    """A prompt that drops all that was sampled leaves none of the rows either."""
    session = Session(spec)
    session.record(0, 1, 2, _full(1, 2))
    session.record(1, 0, 0)
    assert session.sample().tokens.tolist() == [0]
    assert session.experts() is None


@pytest.mark.parametrize("spec", [FULL, RECORDED])
def test_a_turn_that_lost_its_rows_ends_the_sample(spec: ReplaySpec) -> None:
    """In full mode the sample ends before the first turn without rows whose predecessor had some."""
    session = Session(spec)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _full(1, 2, 3, 4, 5, 6))
    session.record(7, 1, 1)
    session.record(9, 1, 1, _full(1, 2, 3, 4, 5, 6, 7, 8, 9, 10))
    sample = session.sample()
    assert (len(sample.tokens), sample.status.value) == (7, "completed")
    assert session.experts() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("spec", [FULL, RECORDED])
def test_turns_before_the_first_rows_are_merged(spec: ReplaySpec) -> None:
    """Earlier turns without rows do no harm: the first full payload has the rows of their tokens."""
    session = Session(spec)
    session.record(0, 2, 2)
    session.record(4, 1, 2)
    session.record(7, 1, 1, _full(1, 2, 3, 4, 5, 6, 7, 8))
    session.record(9, 1, 1, _full(10, 2, 3, 4, 5, 6, 7, 8, 9, 11))
    assert session.experts() == [1 if spec is RECORDED else 10, 2, 3, 4, 5, 6, 7, 8, 9, 11]


@pytest.mark.parametrize("spec", [FULL, RECORDED])
def test_rows_that_never_came_do_not_end_a_sample_which_is_cut_before(spec: ReplaySpec) -> None:
    """If the turns with rows are cut off, the others are merged and the sample has none."""
    session = Session(spec)
    session.record(0, 2, 2)
    session.record(4, 1, 2, _full(1, 2, 3, 4, 5, 6))
    assert session.experts(max_seq_len=4) is None


# max_seq_len → rows of a session whose second turn flipped rows of the first, by spec
CUTS: dict[int, dict[str, list[int]]] = {
    9: {"latest": [10, 2, 3, 4, 5, 6, 7, 8], "recorded": [1, 2, 3, 4, 5, 6, 7, 8]},
    8: {"latest": [10, 2, 3, 4, 5, 6], "recorded": [1, 2, 3, 4, 5, 6]},
    7: {"latest": [10, 2, 3, 4, 5, 6], "recorded": [1, 2, 3, 4, 5, 6]},
    6: {"latest": [10, 2, 3, 4, 5], "recorded": [1, 2, 3, 4, 5]},
    5: {"latest": [1, 2, 3], "recorded": [1, 2, 3]},
    4: {"latest": [1, 2, 3], "recorded": [1, 2, 3]},
    3: {"latest": [1, 2], "recorded": [1, 2]},
}


@pytest.mark.parametrize("max_seq_len", CUTS)
def test_max_seq_len_cuts_rows_with_the_tokens(max_seq_len: int) -> None:
    """A turn that loses output loses rows, and a turn that is dropped gives none: not even of the prefix."""
    for spec in (FULL, RECORDED):
        session = Session(spec)
        session.record(0, 2, 2, _full(1, 2, 3))
        session.record(4, 1, 2, _full(10, 2, 3, 4, 5, 6))
        session.record(7, 1, 1, _full(10, 2, 3, 4, 5, 6, 7, 8))
        assert session.experts(max_seq_len) == CUTS[max_seq_len][spec.prefix]
    session = Session(INCREMENTAL)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _from(3, 4, 5, 6))
    session.record(7, 1, 1, _from(6, 7, 8))
    assert session.experts(max_seq_len) == CUTS[max_seq_len]["recorded"]


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_what_is_not_merged_is_not_judged(spec: ReplaySpec) -> None:
    """A payload that does not fit is no error of a sample which ends before its turn."""
    session = Session(spec)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, Rows(1, np.zeros((9, 5, 5), np.uint8)))
    assert session.experts(max_seq_len=5) == [1, 2, 3]
    with pytest.raises(ReplayBroken):
        session.sample()


def test_a_turn_that_did_not_complete_ends_the_rows() -> None:
    """The sample ends with a turn that was cut at its length, and its rows are that turn's."""
    session = Session(FULL)
    session.record(0, 2, 2, _full(1, 2, 3), finish="length")
    session.record(4, 1, 2, _full(10, 2, 3, 4, 5, 6))
    assert session.experts() == [1, 2, 3]


def test_an_empty_turn_needs_no_rows() -> None:
    """A turn that adds no token has no new row; incremental rows go on behind it."""
    session = Session(INCREMENTAL)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 0, 0)
    session.record(4, 1, 1, _from(3, 4, 5))
    assert session.experts() == [1, 2, 3, 4, 5]


def test_a_trimmed_turn_that_adds_nothing_needs_no_rows() -> None:
    """A prompt that only drops tokens asks for nothing; the rows of the tokens left are the parent's."""
    session = Session(INCREMENTAL)
    session.record(0, 2, 3, _full(1, 2, 3, 4))
    session.record(3, 0, 0)
    assert session.experts() == [1, 2]
    session.record(3, 1, 1, _from(2, 30, 40))
    assert session.experts() == [1, 2, 30, 40]


# Two kinds at once


def test_two_kinds_do_not_mix() -> None:
    """Each kind has its own shape, its own numbers, and its own way to be asked for."""
    session = Session(INCREMENTAL, indexer_topk=FULL)
    session.record(0, 2, 2, _full(1, 2, 3), Rows(0, np.arange(3, dtype=np.uint8).reshape(3, 1, 1)))
    session.record(4, 1, 2, _from(3, 4, 5, 6), Rows(0, np.arange(6, dtype=np.uint8).reshape(6, 1, 1)))
    sample = session.sample()
    assert _numbers(sample.rollout_routed_experts) == [1, 2, 3, 4, 5, 6]
    assert sample.rollout_indexer_topk is not None
    assert sample.rollout_indexer_topk.shape == (6, 1, 1)
    assert sample.rollout_indexer_topk.ravel().tolist() == [0, 1, 2, 3, 4, 5]


Payloads = Sequence[tuple[Rows | None, Rows | None]]
A, B, C = _full(1, 2, 3), _full(1, 2, 3, 4, 5, 6), _full(1, 2, 3, 4, 5, 6, 7, 8)

# experts and indexer rows of three turns of 4, 7 and 9 tokens → tokens of the sample, and which kinds it has
GAPS: dict[str, tuple[Payloads, int, tuple[bool, bool]]] = {
    "none": ([(A, A), (B, B), (C, C)], 9, (True, True)),
    "experts in the third": ([(A, A), (B, B), (None, C)], 7, (True, True)),
    "indexer in the second": ([(A, A), (B, None), (C, C)], 4, (True, True)),
    "each in another": ([(A, A), (B, None), (None, C)], 4, (True, True)),
    "one before its first, the other later": ([(A, None), (B, B), (None, C)], 7, (True, True)),
    "one before its first": ([(A, None), (B, None), (C, C)], 9, (True, True)),
    "one never sent": ([(A, None), (B, None), (C, None)], 9, (True, False)),
    "both before their first": ([(None, None), (B, None), (C, C)], 9, (True, True)),
    "one replaces the other": ([(A, None), (None, B), (None, C)], 4, (True, False)),
}


@pytest.mark.parametrize("case", GAPS)
def test_the_first_kind_that_is_lost_ends_the_sample(case: str) -> None:
    """A gap of either kind ends the sample, and the other kind's rows end with it."""
    payloads, length, has = GAPS[case]
    session = Session(FULL, indexer_topk=FULL)
    for lengths, (experts, indexer) in zip([(0, 2, 2), (4, 1, 2), (7, 1, 1)], payloads, strict=True):
        session.record(*lengths, experts, indexer)
    sample = session.sample()
    assert len(sample.tokens) == length
    found = (sample.rollout_routed_experts, sample.rollout_indexer_topk)
    assert tuple(rows is not None for rows in found) == has
    assert all(_numbers(rows) == list(range(1, length)) for rows in found if rows is not None)


def test_a_gap_of_a_full_kind_spares_an_incremental_one() -> None:
    """The sample ends before the gap, so that what the incremental kind misses behind it is no error."""
    session = Session(INCREMENTAL, indexer_topk=FULL)
    session.record(0, 2, 2, _full(1, 2, 3), A)
    session.record(4, 1, 2, None, None)
    sample = session.sample()
    assert _numbers(sample.rollout_routed_experts) == _numbers(sample.rollout_indexer_topk) == [1, 2, 3]


def test_a_gap_of_an_incremental_kind_is_an_error() -> None:
    """It does not end the sample: later rows would be at wrong positions, and asking again brings none."""
    session = Session(INCREMENTAL, indexer_topk=FULL)
    session.record(0, 2, 2, _full(1, 2, 3), A)
    session.record(4, 1, 2, None, B)
    with pytest.raises(ReplayBroken, match="turn 2: routed_experts was not sent; rows 3 to 5 are missing"):
        session.sample()


# Trees


@pytest.mark.parametrize("spec", [FULL, RECORDED, INCREMENTAL])
def test_every_leaf_has_the_rows_of_its_path(spec: ReplaySpec) -> None:
    """Siblings share their parent's rows and nothing else; later turns of one change nothing of the other."""
    session = Session(spec, mode="tree")
    session.record(0, 2, 2, _full(1, 2, 3))
    is_new = spec is INCREMENTAL
    session.record(4, 1, 1, _from(3, 4, 5) if is_new else _full(10, 2, 3, 4, 5))
    session.record(4, 1, 1, _from(3, 40, 50) if is_new else _full(20, 2, 3, 40, 50), parent=1)
    session.record(6, 1, 0, _from(5, 60) if is_new else _full(20, 2, 3, 40, 50, 60), parent=3)
    session.record(0, 1, 2, _full(7, 8), parent=0)
    assembly = session.assemble(hooks=Hooks(everything, DEFAULT_HOOKS.finish))
    heads = (10, 20) if spec is FULL else (1, 1)
    assert [_numbers(sample.rollout_routed_experts) for sample in assembly.samples] == [
        [heads[0], 2, 3, 4, 5],
        [heads[1], 2, 3, 40, 50, 60],
        [7, 8],
    ]


def test_which_turns_are_read() -> None:
    """A linear session's rows are those of the active path, a tree's those of all turns that have some."""
    seqs: dict[str, list[int]] = {}
    for mode in ("linear", "tree"):
        session = Session(mode=mode)
        session.record(0, 2, 2, _full(1, 2, 3))
        session.record(4, 1, 1, _full(1, 2, 3, 4, 5))
        session.record(4, 1, 1, _full(1, 2, 3, 40, 50), parent=1)
        session.record(6, 1, 1)
        seqs[mode] = [at.seq for at in replay_turns(session.state)]
    assert seqs == {"linear": [1, 3], "tree": [1, 2, 3]}
    assert replay_turns(Session().state) == []


# What is refused

WIDE = np.zeros((6, 2, 3), np.uint8)
DEEP = np.zeros((6, 3, 2), np.uint8)
Records = Sequence[tuple[int, int, int, Rows | None]]

# spec, turns as (keep, suffix, output, rows) → the whole message
REFUSED: dict[str, tuple[ReplaySpec, Records, str]] = {
    "a gap": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(4, 5, 6))],
        "turn 2: routed_experts begins with row 4 and leaves a gap: row 3 comes next",
    ),
    "a gap behind a trim": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (2, 2, 2, _from(3, 4, 5))],
        "turn 2: routed_experts begins with row 3 and leaves a gap: row 2 comes next",
    ),
    "an overlap": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(2, 3, 4, 5, 6))],
        "turn 2: routed_experts begins with row 2 and overlaps: row 3 comes next",
    ),
    "all rows instead of the new ones": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _full(1, 2, 3, 4, 5, 6))],
        "turn 2: routed_experts begins with row 0 and overlaps: row 3 comes next",
    ),
    "the first of full rows left out": (
        FULL,
        [(0, 2, 2, _from(1, 2, 3))],
        "turn 1: routed_experts begins with row 1 and leaves a gap: row 0 comes next",
    ),
    "new rows instead of all": (
        RECORDED,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(3, 4, 5, 6))],
        "turn 2: routed_experts begins with row 3 and leaves a gap: row 0 comes next",
    ),
    "rows missing in the middle": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, None), (7, 1, 1, _from(6, 7, 8))],
        "turn 2: routed_experts was not sent; rows 3 to 5 are missing",
    ),
    "rows missing at the start": (
        INCREMENTAL,
        [(0, 2, 2, None), (4, 1, 2, _from(3, 4, 5, 6))],
        "turn 1: routed_experts was not sent; rows 0 to 2 are missing",
    ),
    "rows missing at the end": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 0, None)],
        "turn 2: routed_experts was not sent; rows 3 to 3 are missing",
    ),
    "rows of a turn that added nothing": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 0, 0, _from(3, 4)), (4, 1, 1, _from(3, 4, 5))],
        "turn 2: routed_experts has 1 rows from 3, but this turn has none",
    ),
    "rows of a turn of one token": (
        FULL,
        [(0, 1, 0, _full(1)), (1, 1, 1, _full(1, 2))],
        "turn 1: routed_experts has 1 rows from 0, but this turn has none",
    ),
    "too few new rows": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(3, 4, 5))],
        "turn 2: routed_experts has 2 rows from 3 on, 3 are needed",
    ),
    "too many new rows": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(3, 4, 5, 6, 7))],
        "turn 2: routed_experts has 4 rows from 3 on, 3 are needed",
    ),
    "no new row": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _from(3))],
        "turn 2: routed_experts has 0 rows from 3 on, 3 are needed",
    ),
    "too few rows": (
        FULL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, _full(1, 2, 3, 4, 5))],
        "turn 2: routed_experts has 5 rows from 0 on, 6 are needed",
    ),
    "too many rows": (
        FULL,
        [(0, 2, 2, _full(1, 2, 3, 4))],
        "turn 1: routed_experts has 4 rows from 0 on, 3 are needed",
    ),
    "too few rows of a turn before the last": (
        FULL,
        [(0, 2, 2, _full(1, 2)), (4, 1, 2, _full(1, 2, 3, 4, 5, 6))],
        "turn 1: routed_experts has 2 rows from 0 on, 3 are needed",
    ),
    "another top-k in full rows": (
        FULL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, Rows(0, WIDE))],
        "turn 2: routed_experts has rows 0 to 5 of 2 layers × 3, the rows before have 2 × 2",
    ),
    "another top-k in recorded rows": (
        RECORDED,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, Rows(0, WIDE))],
        "turn 2: routed_experts has rows 0 to 5 of 2 layers × 3, the rows before have 2 × 2",
    ),
    "another top-k in new rows": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, Rows(3, WIDE[:3]))],
        "turn 2: routed_experts has rows 3 to 5 of 2 layers × 3, the rows before have 2 × 2",
    ),
    "other layers": (
        INCREMENTAL,
        [(0, 2, 2, _full(1, 2, 3)), (4, 1, 2, Rows(3, DEEP[:3]))],
        "turn 2: routed_experts has rows 3 to 5 of 3 layers × 2, the rows before have 2 × 2",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_rows_that_do_not_fit_are_refused(case: str) -> None:
    """A payload other than the one asked for is `replay_broken`, and says of which turn which rows."""
    spec, records, message = REFUSED[case]
    session = Session(spec)
    for record in records:
        session.record(*record)
    with pytest.raises(ReplayBroken) as caught:
        session.assemble()
    assert caught.value.detail == message


def test_a_refusal_names_its_kind() -> None:
    """With two kinds the message tells which one does not fit."""
    session = Session(FULL, indexer_topk=FULL)
    session.record(0, 2, 2, _full(1, 2, 3), _full(1, 2))
    with pytest.raises(ReplayBroken, match="turn 1: indexer_topk has 2 rows from 0 on, 3 are needed"):
        session.assemble()


def test_assembling_rows_changes_nothing() -> None:
    """The same state gives the same rows again, though what was given before was overwritten (INV-9)."""
    session = Session(RECORDED)
    session.record(0, 2, 2, _full(1, 2, 3))
    session.record(4, 1, 2, _full(10, 2, 3, 4, 5, 6))
    before: Mapping[tuple[str, str], bytes] = dict(session.stored)
    rows = session.sample().rollout_routed_experts
    assert rows is not None
    rows[:] = 0
    assert session.experts() == [1, 2, 3, 4, 5, 6]
    assert session.stored == before


def test_a_turn_that_only_trims_has_no_rows_of_its_own() -> None:
    """With rows as they were recorded, a turn that adds no token gives none."""
    session = Session(RECORDED)
    session.record(0, 2, 3, _full(1, 2, 3, 4))
    session.record(3, 0, 0, _full(1, 2))
    assert session.experts() == [1, 2]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, 3)])
def test_rows_of_another_shape_are_never_stretched(shape: tuple[int, int]) -> None:
    """Rows that are said to equal a parent's of another shape are corrupt, not made up."""
    whole = Blob(start=0, rows=3, layers=shape[0], topk=shape[1], dtype="u1", stored=((0, 3),), parts=1)
    again = Blob(start=0, rows=3, layers=2, topk=2, dtype="u1", stored=(), parts=0)
    one = turn(replay={EXPERTS: whole})
    two = turn(parent=1, keep=4, suffix=[], output=[], replay={EXPERTS: again})
    state = state_of(one, two, first=opened(replay={EXPERTS: FULL}))
    with pytest.raises(StreamCorrupt, match="turn 2: rows of routed_experts with"):
        restore(state.turns[1], EXPERTS, {(one.id, EXPERTS): bytes(3 * shape[0] * shape[1])})


def test_restored_rows_have_the_dtype_that_was_sent() -> None:
    """A parent whose rows needed more bytes does not widen its child's."""
    session = Session()
    session.record(0, 2, 2, _full(1, 2, -3))
    child = session.record(4, 0, 0, _full(1, 2, 3))
    rows = restore(child, EXPERTS, session.stored)
    assert rows is not None
    assert rows.values.dtype == np.uint8
