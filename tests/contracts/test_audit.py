"""Audit entries: their bytes, and what a reader refuses.

`golden/audit/<type>.v<n>.json` hold the stream entries that the first program of that version wrote. Like
those of events they never change.
"""

import base64
import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.docs.markdown import DOCS, rows, sections
from tokentape_contracts import keys
from tokentape_contracts.audit import AssembledBy, SamplesAssembled, decode, encode
from tokentape_contracts.errors import EventUnsupported, StreamCorrupt, TokentapeError
from tokentape_contracts.events import Fields

GOLDEN = Path(__file__).parent / "golden" / "audit"
NAME = "samples.assembled.v1"

ENTRY = SamplesAssembled(
    id="7c9e6679742540de944be07fc1f90ae7",
    tail="3-0",
    request="0f8fad5bd9cb469fa16570867728950e",
    contract=2,
    max_seq_len=None,
    metadata={"reward": 0.75, "task": "ä"},
    digest="e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    error=None,
    samples=2,
    by=AssembledBy(
        tokentape="0.1.0",
        tokenizer="00112233aabbccdd",
        template="ddccbbaa33221100",
        pick="tokentape_core.domain.tree.drop_retried",
        finish="a.b.finish",
    ),
    at=1767225602.5,
)
REFUSED = replace(ENTRY, digest=None, error=("prefix_broken", "turn 2: …"), samples=0, max_seq_len=7)


def test_an_entry_is_its_golden_bytes() -> None:
    """An entry is written as the bytes of its golden file, and these are read for ever."""
    golden = json.loads((GOLDEN / f"{NAME}.json").read_text())["base64"]
    entry = {name.encode(): base64.b64decode(value) for name, value in golden.items()}
    assert encode(ENTRY) == entry
    assert decode(entry) == ENTRY
    assert [path.stem for path in GOLDEN.glob("*.json")] == [NAME]


@pytest.mark.parametrize(
    "entry", [REFUSED, replace(ENTRY, metadata=None, by=replace(ENTRY.by, template=None))]
)
def test_entries_come_back(entry: SamplesAssembled) -> None:
    """A refusal, and an entry without metadata and template, come back as they were."""
    assert decode(encode(entry)) == entry


def _json(**values: Any) -> Callable[[Fields], Fields]:
    def edit(entry: Fields) -> Fields:
        content = {**orjson.loads(entry[b"json"]), **values}
        return {**entry, b"json": orjson.dumps({k: v for k, v in content.items() if v is not ...})}

    return edit


REFUSALS: dict[str, tuple[type[TokentapeError], Callable[[Fields], Fields]]] = {
    "unknown type": (EventUnsupported, lambda entry: {**entry, b"type": b"samples.imagined"}),
    "newer version": (EventUnsupported, lambda entry: {**entry, b"v": b"2"}),
    "version 0": (StreamCorrupt, lambda entry: {**entry, b"v": b"0"}),
    "no version": (StreamCorrupt, lambda entry: {b"type": entry[b"type"]}),
    "empty": (StreamCorrupt, lambda _: {}),
    "no id": (StreamCorrupt, lambda entry: {k: v for k, v in entry.items() if k != b"id"}),
    "json damaged": (StreamCorrupt, lambda entry: {**entry, b"json": b"{"}),
    "json a list": (StreamCorrupt, lambda entry: {**entry, b"json": b"[]"}),
    "no tail": (StreamCorrupt, _json(tail=...)),
    "contract true": (StreamCorrupt, _json(contract=True)),
    "by a string": (StreamCorrupt, _json(by="me")),
    "by without a hook": (StreamCorrupt, _json(by={"tokentape": "1"})),
    "digest and error": (StreamCorrupt, _json(error=["code", "detail"])),
    "neither digest nor error": (StreamCorrupt, _json(digest=None)),
    "error of three": (StreamCorrupt, _json(digest=None, error=["a", "b", "c"])),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_reader_refuses(case: str) -> None:
    """A damaged entry is `stream_corrupt`, one of the future is `event_unsupported`."""
    error, damage = REFUSALS[case]
    with pytest.raises(error) as caught:
        decode(damage(encode(ENTRY)))
    assert type(caught.value) is error


def test_unknown_fields_are_ignored() -> None:
    """A field that this version does not know does no harm, in the entry, its JSON or what assembled."""
    by = {**orjson.loads(encode(ENTRY)[b"json"])["by"], "colour": "red"}
    assert decode({**_json(future=1, by=by)(encode(ENTRY)), b"future": b"x"}) == ENTRY


def test_every_field_is_documented() -> None:
    """events.md has a row for each field of an entry, in order, and names its version."""
    section = sections(DOCS / "reference" / "events.md")["`samples.assembled`"]
    of_by = [f"by.{field.name}" for field in fields(AssembledBy)]
    expected = [n for f in fields(SamplesAssembled) for n in (of_by if f.name == "by" else [f.name])]
    assert rows(section) == ["Field", *expected]
    assert f"Version {SamplesAssembled.VERSION}." in section


def test_the_keys_share_the_slot_of_the_session() -> None:
    """Audit and lease lie in the slot of the session's events; the index of all sessions does not need to."""
    names = [keys.events("s1"), keys.audit("s1"), keys.archiving("s1"), keys.blobs("s1")]
    assert {re.search(r"\{(.*?)\}", name)[1] for name in names} == {"s1"}  # type: ignore[index]
    assert len({*names, keys.SEALED}) == 5
