"""What comes from a network or from Redis and is damaged: a known error or a value, nothing else."""

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.driver.fake import payload
from tests.fuzz.conftest import FUZZ
from tests.fuzz.mutate import damaged_bytes, damaged_json, json_values
from tests.support.sessions import opened, sealed, turn
from tokentape_contracts import jobs
from tokentape_contracts.errors import EventUnsupported, StreamCorrupt
from tokentape_contracts.events import OPENED_ID, SEALED_ID, Blob, ReplaySpec, decode, encode
from tokentape_contracts.samples import META, MalformedSamples, SamplesReply, decode_samples
from tokentape_core.domain.state import fold, turn_id

PAYLOADS = {contract: payload(contract=contract) for contract in (1, 2)}


def read(data: bytes, contract: int) -> SamplesReply | None:
    """Decodes within bounds of time and memory."""
    tracemalloc.start()
    began = time.monotonic()
    try:
        return decode_samples(data, contract=contract)
    except MalformedSamples:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 2**20 + 100 * len(data)
        assert time.monotonic() - began < 2


@given(st.data(), st.sampled_from(sorted(PAYLOADS)), st.sampled_from(sorted(PAYLOADS)))
@settings(FUZZ)
def test_damaged_samples(data: st.DataObject, written: int, contract: int) -> None:
    """A container that lost, got or changed bytes, or is of the other contract, is read or is malformed."""
    read(data.draw(damaged_bytes(PAYLOADS[written])), contract)
    read(PAYLOADS[written], contract)


def with_header(container: bytes, header: Any) -> bytes:
    text = orjson.dumps(header)
    size = int.from_bytes(container[:8], "little")
    return len(text).to_bytes(8, "little") + text + container[8 + size :]


@given(st.data(), st.sampled_from(sorted(PAYLOADS)))
@settings(FUZZ)
def test_samples_with_a_damaged_header(data: st.DataObject, contract: int) -> None:
    """The same for the table of tensors: their dtypes, shapes and places."""
    container = PAYLOADS[contract]
    size = int.from_bytes(container[:8], "little")
    header = orjson.loads(container[8 : 8 + size])
    dtypes = st.sampled_from(
        ["BOOL", "F4", "BF16", "F8_E4M3", "F16", "F64", "I8", "U8", "I32", "I64", "U64", "C64"]
    )
    name = data.draw(st.sampled_from(sorted(header)))
    entry = header[name]
    if data.draw(st.booleans()):
        entry = {**entry, "dtype": data.draw(dtypes), "shape": data.draw(_shapes(entry["data_offsets"]))}
    else:
        entry = data.draw(damaged_json(entry))
    read(with_header(container, {**header, name: entry}), contract)


def _shapes(offsets: list[int]) -> Any:
    length = offsets[1] - offsets[0]
    return st.sampled_from(
        [[], [0], [length], [length // 8], [length // 4], [length // 8, 1], [1, length], [2**40, 2**40], [-1]]
    )


def with_meta(container: bytes, meta: Any) -> bytes:
    tensors = safetensors.numpy.load(container)
    tensors[META] = np.frombuffer(orjson.dumps(meta), np.uint8)
    return safetensors.numpy.save(tensors)


@given(st.data(), st.sampled_from(sorted(PAYLOADS)))
@settings(FUZZ)
def test_samples_with_damaged_metadata(data: st.DataObject, contract: int) -> None:
    """The same for the JSON: missing, foreign and oddly typed fields."""
    container = PAYLOADS[contract]
    meta = orjson.loads(safetensors.numpy.load(container)[META].tobytes())
    read(with_meta(container, data.draw(damaged_json(meta))), contract)


def test_a_scalar_for_a_list() -> None:
    """A tensor without a dimension is no list of tokens."""
    for contract, container in PAYLOADS.items():
        tensors = safetensors.numpy.load(container)
        for name in ("tokens.0", "loss_mask.0", "rollout_log_probs.0"):
            scalar = {**tensors, name: np.array(1, tensors[name].dtype)}
            with pytest.raises(MalformedSamples, match=name.removesuffix(".0")):
                decode_samples(safetensors.numpy.save(scalar), contract=contract)


# Events

BLOB = Blob(start=0, rows=3, layers=2, topk=2, dtype="u1", stored=((0, 2), (2, 1)), parts=1)
SPEC = ReplaySpec(rows="incremental", layers=2, prefix="latest")
EVENTS = {
    OPENED_ID: opened(replay={"routed_experts": SPEC}, labels={"a": 1}, pins={"temperature": 1}),
    turn_id(1): turn(messages=[{"role": "user", "content": "hi"}], replay={"routed_experts": BLOB}),
    turn_id(2): turn(parent=1, keep=4, tools=[{"type": "function"}]),
    SEALED_ID: sealed(),
}
ENTRIES = {entry_id: encode(event) for entry_id, event in EVENTS.items()}


@st.composite
def damaged_entry(draw: st.DrawFn, entry: dict[bytes, bytes]) -> dict[bytes, bytes]:
    field = draw(st.sampled_from(sorted(entry)))
    kind = draw(st.sampled_from(["json", "bytes", "drop", "add", "version", "type"]))
    match kind:
        case "json":
            return {**entry, b"json": orjson.dumps(draw(damaged_json(orjson.loads(entry[b"json"]))))}
        case "bytes":
            return {**entry, field: draw(damaged_bytes(entry[field]))}
        case "drop":
            return {name: value for name, value in entry.items() if name != field}
        case "add":
            return {**entry, draw(st.binary(max_size=4)): draw(st.binary(max_size=9))}
        case "version":
            return {
                **entry,
                b"v": draw(st.sampled_from([b"0", b"-1", b"1", b"2", b"99", b"1_0", b"9" * 5000, b""])),
            }
        case _:
            return {**entry, b"type": draw(st.sampled_from([e.TYPE.encode() for e in EVENTS.values()]))}


@given(st.data(), st.sampled_from(sorted(ENTRIES)))
@settings(FUZZ, max_examples=400)
def test_damaged_events(data: st.DataObject, entry_id: str) -> None:
    """A damaged entry is an event, corrupt, or not supported; and so is the stream that it stands in."""
    entry = data.draw(damaged_entry(ENTRIES[entry_id]))
    try:
        event = decode(entry)
    except (EventUnsupported, StreamCorrupt):
        return
    stream = {**EVENTS, entry_id: event}
    try:
        state = fold(stream.items())
    except StreamCorrupt:
        return
    assert state is not None
    for recorded in state.turns:
        assert len(recorded.tokens) == recorded.length


# Jobs

JOB = jobs.AssembleJob("sid", "1-0", "digest", 1, 100, {"reward": 1.0})


@given(st.one_of(st.binary(max_size=40), json_values.map(orjson.dumps)))
@settings(FUZZ)
def test_what_arq_reads(data: bytes) -> None:
    """arq's deserialiser gives JSON or a ValueError, and runs nothing."""
    try:
        value = jobs.deserialize(data)
    except ValueError:
        return
    assert value is None or isinstance(value, bool | int | float | str | list | dict)


@given(damaged_json(JOB.to_json()))
@settings(FUZZ)
def test_damaged_jobs(fields: Any) -> None:
    """A job with other fields than its own is refused when it is read."""
    reads: Callable[[Any], Any] = jobs.AssembleJob.from_json
    if isinstance(fields, dict) and fields.keys() == JOB.to_json().keys():
        assert reads(fields).to_json() == fields
    else:
        with pytest.raises(TypeError):
            reads(fields)
