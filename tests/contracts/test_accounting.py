"""The accounting of a session: it adds up, says what became of every token, and crosses the wire."""

import pickle
from typing import Any

import orjson
import pytest

from tokentape_contracts.accounting import FATES, TRAINED, Accounting, LeftOut, Reason

SOME = Accounting(
    generations=4,
    sampled_tokens=91,
    trained_tokens=28,
    left_out=[
        LeftOut(1, 1, Reason.TRIMMED),
        LeftOut(2, 40, Reason.RETRIED, by=3),
        LeftOut(4, 2, Reason.TRIMMED),
        LeftOut(4, 20, Reason.OVER_MAX_SEQ_LEN),
    ],
)
JSON: dict[str, Any] = {
    "generations": 4,
    "sampled_tokens": 91,
    "trained_tokens": 28,
    "left_out": [
        {"turn": 1, "tokens": 1, "reason": "trimmed", "by": None},
        {"turn": 2, "tokens": 40, "reason": "retried", "by": 3},
        {"turn": 4, "tokens": 2, "reason": "trimmed", "by": None},
        {"turn": 4, "tokens": 20, "reason": "over_max_seq_len", "by": None},
    ],
}


def test_as_json() -> None:
    """The JSON is plain objects, with reasons as text, in the order of the turns."""
    assert orjson.loads(orjson.dumps(SOME.to_json())) == JSON


def test_it_comes_back() -> None:
    """What was written is read as the same value, and pickling keeps it."""
    assert Accounting.from_json(orjson.loads(orjson.dumps(SOME.to_json()))) == SOME
    assert pickle.loads(pickle.dumps(SOME)) == SOME  # noqa: S301
    nothing = Accounting(0, 0, 0)
    assert Accounting.from_json(nothing.to_json()).fates == nothing.fates == {}


def test_keys_of_a_newer_version_are_ignored() -> None:
    """A key that this version does not know is no error, in the accounting and in an entry."""
    entries = [{**entry, "why": "new"} for entry in JSON["left_out"]]
    assert Accounting.from_json({**JSON, "left_out": entries, "new": 1}) == SOME


def test_fates() -> None:
    """Each fate that a token had, over all turns; together they are all that was sampled."""
    assert SOME.fates == {"trained": 28, "trimmed": 3, "retried": 40, "over_max_seq_len": 20}
    assert sum(SOME.fates.values()) == SOME.sampled_tokens
    assert Accounting(1, 2, 0, [LeftOut(1, 2, Reason.AFTER_CUT)]).fates == {"after_cut": 2}


def test_every_fate_has_a_name() -> None:
    """The fates are `trained` and the reasons, none twice."""
    assert set(FATES) == {TRAINED, *Reason}
    assert len(FATES) == len(set(FATES)) == 1 + len(Reason)


@pytest.mark.parametrize(
    ("counts", "left_out", "match"),
    [
        ((1, 5, 4), [], "5 tokens were sampled, but 4 are trained and 0 left out"),
        ((1, 5, 4), [LeftOut(1, 2, Reason.TRIMMED)], "4 are trained and 2 left out"),
        ((1, 0, -1), [LeftOut(1, 1, Reason.TRIMMED)], "below 0"),
        ((1, 1, 1), [LeftOut(1, 0, Reason.TRIMMED)], "names none"),
        ((2, 1, 1), [LeftOut(1, 3, Reason.TRIMMED), LeftOut(2, -3, Reason.TRIMMED)], "names none"),
    ],
)
def test_what_does_not_add_up_cannot_be_made(
    counts: tuple[int, int, int], left_out: list[LeftOut], match: str
) -> None:
    """Every sampled token is trained or left out, and no number makes up for another."""
    with pytest.raises(ValueError, match=match):
        Accounting(*counts, left_out)


@pytest.mark.parametrize(
    "fields",
    [
        None,
        [],
        "accounting",
        {},
        *({name: value for name, value in JSON.items() if name != missing} for missing in JSON),
        {**JSON, "sampled_tokens": 92},
        {**JSON, "generations": "4"},
        {**JSON, "generations": 4.0},
        {**JSON, "generations": True},
        {**JSON, "trained_tokens": None},
        {**JSON, "left_out": None},
        {**JSON, "left_out": [1]},
        {**JSON, "left_out": "none"},
    ],
    ids=repr,
)
def test_what_is_no_accounting(fields: Any) -> None:
    """A missing or wrongly typed field, and numbers that do not add up, are a ValueError and nothing else."""
    with pytest.raises(ValueError, match=r".+"):
        Accounting.from_json(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"turn": "2"},
        {"turn": None},
        {"tokens": 40.0},
        {"tokens": True},
        {"reason": None},
        {"reason": []},
        {"by": "3"},
        {"by": False},
    ],
    ids=repr,
)
def test_what_is_no_entry(change: dict[str, Any]) -> None:
    """The same for an entry of `left_out`; a reason that this version does not know is refused."""
    entries = [{**entry, **change} if entry["turn"] == 2 else entry for entry in JSON["left_out"]]
    with pytest.raises(ValueError, match=r".+"):
        Accounting.from_json({**JSON, "left_out": entries})


@pytest.mark.parametrize("name", ["turn", "tokens", "reason", "by"])
def test_an_entry_has_every_field(name: str) -> None:
    """An entry that lacks a field is refused."""
    entries = [{key: value for key, value in entry.items() if key != name} for entry in JSON["left_out"]]
    with pytest.raises(ValueError, match="not an accounting: KeyError"):
        Accounting.from_json({**JSON, "left_out": entries})


def test_a_newer_servers_reason_is_read() -> None:
    """A reason that this version does not know stays a text: the tokens still add up, and are told."""
    fields = {
        "generations": 1,
        "sampled_tokens": 3,
        "trained_tokens": 1,
        "left_out": [{"turn": 1, "tokens": 2, "reason": "evaporated", "by": None}],
    }
    read = Accounting.from_json(fields)
    assert read.left_out == [LeftOut(1, 2, "evaporated")]
    assert read.to_json() == fields
