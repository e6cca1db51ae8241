"""Random values: what is written is what is read."""

import contextlib
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.sessions import plain
from tokentape_contracts.events import (
    Blob,
    ReplaySpec,
    SessionOpened,
    SessionSealed,
    TurnRecorded,
    decode,
    encode,
)
from tokentape_contracts.samples import WIRE, MalformedSamples, Sample, Status, decode_samples, encode_samples

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**63), 2**63 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | finite | text
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(text, values, max_size=3)
ids = hnp.arrays(np.int32, st.integers(0, 20))


def _exact(value: Any) -> Any:
    """Comparable with its types: 1, 1.0 and true are equal in Python but not in an event."""
    if isinstance(value, dict):
        return {key: _exact(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(inner) for inner in value]
    return (type(value).__name__, repr(value))


specs = st.builds(ReplaySpec, rows=text, layers=st.none() | numbers, prefix=text)


@st.composite
def blobs(draw: st.DrawFn) -> Blob:
    """A blob whose runs ascend within its rows."""
    start, rows = draw(st.integers(0, 1000)), draw(st.integers(0, 1000))
    edges = sorted(draw(st.sets(st.integers(start, start + rows), max_size=6)))
    return Blob(
        start=start,
        rows=rows,
        layers=draw(numbers),
        topk=draw(numbers),
        dtype=draw(st.sampled_from(["u1", "u2", "i4"])),
        stored=tuple((a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False)),
        parts=draw(numbers),
    )


@st.composite
def turns(draw: st.DrawFn) -> TurnRecorded:
    output = draw(ids)
    return TurnRecorded(
        id=draw(text),
        parent=draw(numbers),
        keep=draw(numbers),
        suffix=draw(ids),
        output=output,
        logprobs=draw(hnp.arrays(np.float64, len(output))),
        finish=draw(text),
        response_id=draw(text),
        messages=draw(st.lists(objects, max_size=3)),
        tools=draw(st.none() | st.lists(values, max_size=2)),
        altered=draw(st.lists(st.integers(0, 9), max_size=2)),
        request=draw(objects),
        reply=draw(objects),
        meta=draw(objects),
        replay=draw(st.dictionaries(text, blobs(), max_size=2)),
        requested_at=draw(finite),
        committed_at=draw(finite),
    )


opened = st.builds(
    SessionOpened,
    id=text,
    mode=text,
    matcher=text,
    family=text,
    max_trim_tokens=numbers,
    template=text,
    labels=objects,
    pins=objects,
    replay=st.dictionaries(text, specs, max_size=2),
    tenant=text,
    opened_at=finite,
)
sealed = st.builds(SessionSealed, id=text, reason=text, sealed_at=finite)


@given(turns() | opened | sealed)
def test_an_event_comes_back(event: Any) -> None:
    """decode(encode(event)) is the event, to the type and the bit; writing it again gives the same bytes."""
    entry = encode(event)
    again = decode(entry)
    assert type(again) is type(event)
    assert _exact(plain(again)) == _exact(plain(event))
    assert encode(again) == entry


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 8))
    response = draw(st.integers(0, length))
    experts = st.none() | hnp.arrays(np.int32, (max(length - 1, 0), 2, 2))
    log_probs = st.floats(max_value=0, allow_infinity=False, width=32)
    return Sample(
        tokens=draw(
            hnp.arrays(st.sampled_from([np.int32, np.int64]), length, elements=st.integers(0, 2**31 - 1))
        ),
        response=draw(text),
        response_length=response,
        loss_mask=draw(
            hnp.arrays(st.sampled_from([np.bool_, np.uint8]), response, elements=st.integers(0, 1))
        ),
        rollout_log_probs=draw(
            hnp.arrays(st.sampled_from([np.float32, np.float64]), response, elements=log_probs)
        ),
        status=draw(st.sampled_from(list(Status))),
        rollout_routed_experts=draw(experts),
        rollout_indexer_topk=draw(experts),
        weight_versions=draw(st.lists(text, max_size=2)),
        prefix_cache_info=draw(st.dictionaries(text, numbers, max_size=2)),
        spec_info=draw(st.dictionaries(text, numbers, max_size=2)),
        metadata=draw(objects),
        reward=draw(st.none() | finite | objects),
    )


@given(
    st.lists(samples(), max_size=3),
    hnp.arrays(np.int32, st.integers(0, 9), elements=st.integers(0, 2**31 - 1)),
    st.sampled_from([None, "no_records", "all_truncated"]),
    st.sampled_from([1, 2]),
)
def test_samples_come_back(given: list[Sample], tokens: Any, reason: str | None, contract: int) -> None:
    """decode(encode(samples)) has every value, to the type and the bit."""
    payload = encode_samples(given, {"accumulated_token_ids": tokens, "n": 1}, reason, contract=contract)
    reply = decode_samples(payload, contract=contract)
    assert reply.empty_reason == reason
    assert reply.session_metadata == {"accumulated_token_ids": tokens.tolist(), "n": 1}
    assert len(reply.samples) == len(given)
    for values_, sample in zip(reply.samples, given, strict=True):
        for name, row in WIRE.items():
            value = getattr(sample, name)
            if value is None:
                assert values_[name] == (row.null() if row.carried == "tensor" else None)
            elif row.decoded == "array":
                assert np.array_equal(values_[name], value)
            elif row.carried == "tensor":
                assert np.array(values_[name], row.dtype).tobytes() == value.astype(row.dtype).tobytes()
            else:
                assert _exact(values_[name]) == _exact(value)


@given(st.binary(max_size=60) | st.binary(max_size=40).map(lambda b: b"\x20" + b"\0" * 7 + b))
def test_random_bytes_are_never_samples(payload: bytes) -> None:
    """Whatever comes, the reader raises its own error or reads a whole reply."""
    with contextlib.suppress(MalformedSamples):
        decode_samples(payload)
