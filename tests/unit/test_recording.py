"""Whole sessions and their form as a file."""

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recordings import KIND, assembled, content, recording
from tests.support.sessions import new_id, turn
from tokentape_contracts import keys, limits
from tokentape_contracts.events import Fields, encode
from tokentape_core.recording import Recording, RecordingError, dump, ensure_whole, load


def test_sessions_come_back_to_the_byte() -> None:
    """Two sessions written to a file and read again are what they were, and are whole."""
    given = [recording(), recording("s2", 1)]
    found = load(dump(given))
    assert [content(each) for each in found] == [content(each) for each in given]
    assert [len(ensure_whole(each).turns) for each in found] == [11, 1]


@given(
    st.dictionaries(st.binary(min_size=1, max_size=5), st.binary(max_size=9), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), unique=True, max_size=4),
    st.dictionaries(st.binary(max_size=5).map(lambda name: name.decode("latin-1")), st.binary(max_size=9)),
)
def test_any_bytes_are_carried(entry: Fields, ids: list[tuple[int, int]], blobs: dict[str, bytes]) -> None:
    """Whatever the names, their order and the bytes are, they come back."""
    entries = [(f"{milliseconds}-{number}", entry) for milliseconds, number in sorted(ids)]
    before = Recording("s", [("0-1", entry)], blobs, entries)
    [after] = load(dump([before]))
    assert content(after) == content(before)


def test_equal_recordings_give_equal_bytes() -> None:
    """Writing a session twice gives the same file, also in another order."""
    one, two = recording(), recording("s2", 2)
    assert dump([one, two]) == dump([two, one])


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, 0.5, 0.99, -1])
def test_a_file_that_was_cut_off(keep: float) -> None:
    """A part of a file is refused."""
    data = dump([recording()])
    cut = data[: int(keep * len(data))] if 0 < keep < 1 else data[: int(keep)]
    with pytest.raises(RecordingError):
        load(cut)


def test_any_byte_that_changed_is_found() -> None:
    """A changed bit is refused wherever it is: in the header, in names, in data."""
    data = dump([recording(turns=1)])
    intact = content(load(data)[0])
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        try:
            found = load(bytes(damaged))
        except RecordingError:
            continue
        assert [content(each) for each in found] == [intact], f"byte {at}"


def _relabelled(edit: Callable[[dict[str, object]], object]) -> bytes:
    data = dump([recording(turns=1)])
    size = int.from_bytes(data[:8], "little")
    header = orjson.loads(data[8 : 8 + size])
    header["__metadata__"]["tokentape"] = orjson.dumps(
        edit(orjson.loads(header["__metadata__"]["tokentape"]))
    ).decode()
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


FOREIGN: dict[str, tuple[bytes, str]] = {
    "text": (b"hello, this is no such file at all", "not a file"),
    "samples": (safetensors.numpy.save({"a": np.zeros(3, np.uint8)}), "label"),
    "newer format": (_relabelled(lambda label: {**label, "format": 2}), "upgrade"),
    "format 0": (_relabelled(lambda label: {**label, "format": 0}), "damaged"),
    "no format": (_relabelled(lambda label: {"sha256": label["sha256"]}), "label"),
    "label a list": (_relabelled(lambda label: [1]), "label"),
    "another checksum": (_relabelled(lambda label: {**label, "sha256": "0" * 64}), "checksum"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_files(name: str) -> None:
    """A file of somebody else or of a newer format is refused, with the reason."""
    data, reason = FOREIGN[name]
    with pytest.raises(RecordingError, match=reason):
        load(data)


def test_names_that_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with a right checksum and wrong names is refused."""
    for name in (
        "s",
        "s/events/1-0",
        "s/events/x/0/json",
        "s/events/1-0/x/json",
        "s/other/1-0/0/json",
        "/blobs/x",
    ):
        monkeypatch.setattr("tokentape_core.recording._values", lambda _, name=name: iter([(name, b"")]))
        with pytest.raises(RecordingError):
            load(dump([recording(turns=1)]))


def _broken() -> dict[str, tuple[Recording, str]]:
    whole = recording(turns=3)
    part = keys.blob_part(new_id(), KIND, 0)
    first = min(whole.blobs)
    return {
        "no events": (replace(whole, events=[]), "no events"),
        "a turn is missing": (replace(whole, events=whole.events[:2] + whole.events[3:]), "does not follow"),
        "no opening": (replace(whole, events=whole.events[1:]), "begins with"),
        "an entry of the future": (
            replace(whole, events=[*whole.events[:-1], (whole.events[-1][0], {b"type": b"x", b"v": b"1"})]),
            "upgrade",
        ),
        "an event is damaged": (
            replace(whole, events=[whole.events[0], ("1-0", {**encode(turn()), b"json": b"{"})]),
            "cannot be read",
        ),
        "rows are missing": (
            replace(whole, blobs={k: v for k, v in whole.blobs.items() if k != first}),
            "rows of turn 1 are missing",
        ),
        "a part is too long": (
            replace(whole, blobs={**whole.blobs, part: bytes(limits.STORE_VALUE_BYTES + 1)}),
            "is above",
        ),
        **{
            name: (replace(whole, events=[*whole.events[:2], ("2-0", encode(turn(**given)))]), reason)
            for name, given, reason in (
                (
                    "a negative id",
                    {"suffix": [1, -2]},
                    "session s1: turn 2 holds the negative id -2 in its prompt",
                ),
                ("a negative sampled id", {"output": [-1]}, "turn 2 holds the negative id -1 in its output"),
                ("NaN", {"logprobs": [-0.5, np.nan]}, "turn 2 holds nan as the log-prob of output token 1"),
                (
                    "-inf",
                    {"logprobs": [-np.inf, -0.5]},
                    "turn 2 holds -inf as the log-prob of output token 0",
                ),
                ("a probability", {"logprobs": [0.4, 0.6]}, "turn 2 holds 0.4 as the log-prob"),
            )
        },
        "an audit entry is damaged": (replace(whole, audit=[("1-0", {b"type": b"x"})]), "not an audit entry"),
        "the audit does not ascend": (replace(whole, audit=whole.audit[::-1]), "do not ascend"),
        "an audit id in another spelling": (replace(whole, audit=[("01-0", assembled())]), "do not ascend"),
    }


@pytest.mark.parametrize("name", list(_broken()))
def test_what_is_not_whole(name: str) -> None:
    """A session with a hole, with missing rows or with what this version cannot read is not whole."""
    broken, reason = _broken()[name]
    with pytest.raises(RecordingError, match=reason):
        ensure_whole(broken)


def test_containing() -> None:
    """A session contains a copy of it from before another collect, and not one of other events or rows."""
    now = recording(turns=2)
    before = replace(now, audit=now.audit[:1], blobs=dict([*now.blobs.items()][:1]))
    assert now.contains(now)
    assert now.contains(before)
    assert not before.contains(now)
    assert not now.contains(replace(now, events=now.events[:-1]))
    assert not now.contains(replace(now, blobs={k: v + b"x" for k, v in now.blobs.items()}))
