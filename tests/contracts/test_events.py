"""Session events: their bytes, their versions, and what a reader refuses.

`golden/<type>.v<n>.json` hold the stream entries that the first program of that version wrote. Never change
these files: streams in Redis and in archives hold exactly these bytes. A new version gets a new file.
"""

import base64
import json
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from tests.support.sessions import plain, turn
from tokentape_contracts import events
from tokentape_contracts.errors import EventUnsupported, StreamCorrupt, TokentapeError
from tokentape_contracts.events import (
    TYPES,
    UPCASTS,
    Blob,
    Fields,
    ReplaySpec,
    SessionOpened,
    SessionSealed,
    TurnRecorded,
    decode,
    encode,
)

GOLDEN = Path(__file__).parent / "golden"

OPENED = SessionOpened(
    id="0f8fad5bd9cb469fa16570867728950e",
    mode="linear",
    matcher="loose_tool_call",
    altered_answer="keep",
    family="qwen3",
    max_trim_tokens=1,
    template="sha256:1b2c",
    labels={"run": "ä 7", "evaluation": False},
    pins={"temperature": 1.0, "lora_path": "a/b"},
    replay={
        "routed_experts": ReplaySpec(rows="incremental", layers=48, prefix="latest"),
        "indexer_topk": ReplaySpec(rows="full", layers=None, prefix="recorded"),
    },
    tenant="lab-7",
    opened_at=1767225600.25,
)
TURN = TurnRecorded(
    id="7c9e6679742540de944be07fc1f90ae7",
    parent=2,
    keep=41,
    suffix=np.array([151645, 198, 0, 2147483647], np.int32),
    output=np.array([40, -1, 151645], np.int32),
    logprobs=np.array([-0.1, -0.0, -1.7976931348623157e308], np.float64),
    finish="tool_calls",
    response_id="chatcmpl-1",
    messages=[
        {"role": "user", "content": "naïve 🙂 \u0000"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"arguments": "{}"}}]},
    ],
    tools=[{"type": "function", "function": {"name": "ls"}}],
    altered=[2, 11],
    request={"temperature": 0.7, "chat_template_kwargs": {"enable_thinking": True}},
    reply={"model": "m", "usage": {"completion_tokens": 3}, "choices": [{"index": 0}]},
    meta={"weight_version": "5", "cached_tokens": 40, "e2e_latency": 0.25},
    replay={
        "routed_experts": Blob(
            start=43, rows=5, layers=48, topk=8, dtype="u1", stored=((43, 2), (47, 1)), parts=1
        )
    },
    requested_at=1767225601,
    committed_at=1767225602.5,
)
SEALED = SessionSealed(id="16fd2706-8baf", reason="deleted", sealed_at=1767225700.0)
NEWEST = {"session.opened.v3": OPENED, "turn.recorded.v3": TURN, "session.sealed.v1": SEALED}
EXAMPLES = {
    "session.opened.v1": replace(OPENED, replay={}, tenant="", altered_answer="refuse"),
    "session.opened.v2": replace(OPENED, altered_answer="refuse"),
    "turn.recorded.v1": replace(TURN, replay={}, altered=[]),
    "turn.recorded.v2": replace(TURN, altered=[]),
    **NEWEST,
}


def _golden(name: str) -> Fields:
    fields = json.loads((GOLDEN / f"{name}.json").read_text())["base64"]
    return {key.encode(): base64.b64decode(value) for key, value in fields.items()}


@pytest.mark.parametrize("name", NEWEST)
def test_the_newest_version_writes_its_golden_bytes(name: str) -> None:
    """An event is written as exactly the bytes of its golden file."""
    assert encode(EXAMPLES[name]) == _golden(name)


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_are_read_for_ever(name: str) -> None:
    """The golden bytes of every version give the event that was written."""
    assert plain(decode(_golden(name))) == plain(EXAMPLES[name])


def test_every_version_of_every_type_has_a_golden_file() -> None:
    """No type and no version exists without golden bytes, and no file without a type."""
    expected = {f"{kind.TYPE}.v{v}" for kind in TYPES.values() for v in range(1, kind.VERSION + 1)}
    assert {path.stem for path in GOLDEN.glob("*.json")} == expected == set(EXAMPLES)


def _without(field: bytes) -> Callable[[Fields], Fields]:
    return lambda entry: {name: value for name, value in entry.items() if name != field}


def _with(**values: bytes) -> Callable[[Fields], Fields]:
    return lambda entry: {**entry, **{name.encode(): value for name, value in values.items()}}


def _json(**values: Any) -> Callable[[Fields], Fields]:
    def edit(entry: Fields) -> Fields:
        content = {**orjson.loads(entry[b"json"]), **values}
        return {**entry, b"json": orjson.dumps({k: v for k, v in content.items() if v is not ...})}

    return edit


def _blob(**values: Any) -> Callable[[Fields], Fields]:
    return _json(replay={"routed_experts": {**asdict(TURN.replay["routed_experts"]), **values}})


REFUSALS: dict[str, tuple[type[TokentapeError], Callable[[Fields], Fields]]] = {
    "unknown type": (EventUnsupported, _with(type=b"turn.imagined")),
    "newer version": (EventUnsupported, _with(v=b"4")),
    "version 0": (StreamCorrupt, _with(v=b"0")),
    "negative version": (StreamCorrupt, _with(v=b"-1")),
    "version not a number": (StreamCorrupt, _with(v=b"one")),
    "version of 5000 digits": (StreamCorrupt, _with(v=b"9" * 5000)),
    "no version": (StreamCorrupt, _without(b"v")),
    "no type": (StreamCorrupt, _without(b"type")),
    "type not UTF-8": (StreamCorrupt, _with(type=b"\xff")),
    "empty entry": (StreamCorrupt, lambda _: {}),
    "no id": (StreamCorrupt, _without(b"id")),
    "id not UTF-8": (StreamCorrupt, _with(id=b"\xff")),
    "no json": (StreamCorrupt, _without(b"json")),
    "json damaged": (StreamCorrupt, _with(json=b"{")),
    "json a list": (StreamCorrupt, _with(json=b"[]")),
    "json a string": (StreamCorrupt, _with(json=b'"x"')),
    "json null": (StreamCorrupt, _with(json=b"null")),
    "missing field": (StreamCorrupt, _json(finish=...)),
    "null field": (StreamCorrupt, _json(finish=None)),
    "wrong type": (StreamCorrupt, _json(parent="2")),
    "bool for int": (StreamCorrupt, _json(parent=True)),
    "float for int": (StreamCorrupt, _json(keep=41.0)),
    "bool for number": (StreamCorrupt, _json(committed_at=True)),
    "object for list": (StreamCorrupt, _json(messages={})),
    "a message that is no object": (StreamCorrupt, _json(messages=[{"role": "user"}, "hi"])),
    "string for tools": (StreamCorrupt, _json(tools="none")),
    "blob without a dtype": (StreamCorrupt, _json(replay={"k": {"stored": []}})),
    "blob not an object": (StreamCorrupt, _json(replay={"k": 1})),
    "blob of an unknown dtype": (StreamCorrupt, _blob(dtype="f8")),
    "blob runs that overlap": (StreamCorrupt, _blob(stored=[[43, 2], [44, 1]])),
    "blob runs before its start": (StreamCorrupt, _blob(stored=[[42, 1]])),
    "blob runs behind its end": (StreamCorrupt, _blob(stored=[[47, 2]])),
    "blob with an empty run": (StreamCorrupt, _blob(stored=[[43, 0]])),
    "blob with an unknown field": (StreamCorrupt, _blob(colour="red")),
    "no suffix": (StreamCorrupt, _without(b"suffix")),
    "no log-probs": (StreamCorrupt, _without(b"logprobs")),
    "odd-sized suffix": (StreamCorrupt, _with(suffix=b"\x00" * 7)),
    "odd-sized log-probs": (StreamCorrupt, _with(logprobs=b"\x00" * 23)),
    "fewer log-probs than tokens": (StreamCorrupt, _with(logprobs=b"\x00" * 16)),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_reader_refuses(case: str) -> None:
    """A damaged entry is `stream_corrupt`, one of the future is `event_unsupported`; none is skipped."""
    error, damage = REFUSALS[case]
    with pytest.raises(error) as caught:
        decode(damage(encode(TURN)))
    assert type(caught.value) is error


def test_unknown_fields_are_ignored() -> None:
    """A field that this version does not know does no harm, in the entry and in its JSON."""
    entry = _with(future=b"x")(_json(future=1)(encode(TURN)))
    assert plain(decode(entry)) == plain(TURN)


def test_older_versions_are_lifted_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry of v1 goes through the upcasts 1 → 2 and 2 → 3 in this order, then is validated."""
    monkeypatch.setattr(SessionSealed, "VERSION", 3)

    def rename(entry: Fields) -> Fields:
        content = orjson.loads(entry[b"json"])
        return {**entry, b"json": orjson.dumps({"cause": content["why"], "sealed_at": content["at"]})}

    def rename_again(entry: Fields) -> Fields:
        content = orjson.loads(entry[b"json"])
        content["reason"] = content.pop("cause")
        return {**entry, b"json": orjson.dumps(content)}

    upcasts = {("session.sealed", 1): rename, ("session.sealed", 2): rename_again}
    entry = {b"type": b"session.sealed", b"id": b"x", b"v": b"1", b"json": b'{"why":"deleted","at":7.5}'}
    newest = {**entry, b"v": b"3", b"json": b'{"reason":"deleted","sealed_at":7.5}'}
    middle = {**entry, b"v": b"2", b"json": b'{"cause":"deleted","sealed_at":7.5}'}
    expected = SessionSealed(id="x", reason="deleted", sealed_at=7.5)
    assert [decode(e, upcasts) for e in (entry, middle, newest)] == [expected] * 3


def test_a_damaged_old_entry_is_found_after_the_upcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation sees what the upcasts made, so a field that they do not supply is missed."""
    monkeypatch.setattr(SessionSealed, "VERSION", 2)
    entry = {**encode(SEALED), b"v": b"1", b"json": b"{}"}
    with pytest.raises(StreamCorrupt, match="reason"):
        decode(entry, {("session.sealed", 1): dict})


def test_every_older_version_has_an_upcast() -> None:
    """The registry leads from every version to the newest."""
    assert set(UPCASTS) == {(kind.TYPE, v) for kind in TYPES.values() for v in range(1, kind.VERSION)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("    opened_at: float", "    opened_at: float\n    colour: str"), "not all carried"),
        (("    VERSION: ClassVar[int] = 3", "    VERSION: ClassVar[int] = 4"), "cannot be read"),
    ],
    ids=["field without a carrier", "version without an upcast"],
)
def test_an_incomplete_table_is_an_error_at_import(change: tuple[str, str], message: str) -> None:
    """A field that is not carried, or a version that cannot be lifted, stops the program at import."""
    source = Path(str(events.__file__)).read_text()
    assert change[0] in source
    module = types.ModuleType("tokentape_contracts.events")
    with pytest.raises(RuntimeError, match=message):
        exec(source.replace(*change, 1), module.__dict__)  # noqa: S102


def test_wider_integers_are_written_if_no_value_changes() -> None:
    """Token ids may come in any integer dtype."""
    entry = encode(_replaced(suffix=np.array([1, 2**31 - 1], np.int64)))
    assert decode(entry).suffix.tolist() == [1, 2**31 - 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"suffix": np.array([2**31], np.int64)},
        {"suffix": np.array([1.5])},
        {"suffix": np.array([np.nan])},
        {"suffix": np.array([[1, 2]], np.int32)},
        {"suffix": np.array(7, np.int32)},
    ],
    ids=["wraps", "fraction", "nan", "two dimensions", "no dimension"],
)
def test_a_token_that_would_change_is_not_written(fields: dict[str, Any]) -> None:
    """An id that int32 cannot hold is refused, never wrapped (INV-2)."""
    with pytest.raises(ValueError, match="does not fit"):
        encode(_replaced(**fields))


def test_strided_arrays_are_written_in_order() -> None:
    """A view that is not contiguous is written element by element."""
    entry = encode(_replaced(suffix=np.arange(10, dtype=np.int32)[::-2]))
    assert decode(entry).suffix.tolist() == [9, 7, 5, 3, 1]


def test_log_probs_keep_every_bit() -> None:
    """Log-probs come back bit by bit, also -0.0, the smallest subnormal and a NaN's payload."""
    bits = np.array([1 << 63, 1, 0x7FF8000000000123, 0xFFF0000000000000], np.uint64)
    event = turn(output=[1, 2, 3, 4], logprobs=bits.view(np.float64))
    assert decode(encode(event)).logprobs.view(np.uint64).tolist() == bits.tolist()


def test_empty_arrays_are_carried() -> None:
    """A turn without suffix and without output is an event too."""
    event = decode(encode(turn(suffix=[], output=[])))
    assert (event.suffix.tolist(), event.output.tolist(), event.logprobs.tolist()) == ([], [], [])


def test_what_was_read_cannot_be_changed() -> None:
    """Arrays of a decoded event are read-only."""
    with pytest.raises(ValueError, match="read-only"):
        decode(encode(TURN)).output[0] = 1


def _replaced(**fields: Any) -> TurnRecorded:
    return replace(TURN, **fields)
