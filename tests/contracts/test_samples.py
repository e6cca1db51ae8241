"""The samples codec: what it carries, and what each side refuses."""

import sys
import types
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.support.samples import pack, sample, session, unpack
from tokentape_contracts import limits, samples
from tokentape_contracts.samples import (
    ACCUMULATED,
    META,
    OPTIONAL_FIELDS,
    TENSOR_FIELDS,
    WIRE,
    MalformedSamples,
    Sample,
    Status,
    decode_samples,
    encode_samples,
)

EXPERTS = np.arange(16, dtype=np.int32).reshape(4, 2, 2)


@pytest.mark.parametrize("contract", [1, 2])
def test_round_trip(contract: int) -> None:
    """Every field comes back with its value, in the Python type that the table names."""
    given = [
        sample(rollout_routed_experts=EXPERTS, spec_info={"spec_verify_ct": 3}, reward=0.5),
        sample(status=Status.TRUNCATED, rollout_indexer_topk=EXPERTS - 9, response="ä🙂\u0000"),
    ]
    reply = decode_samples(encode_samples(given, session([1, 2]), contract=contract), contract=contract)
    assert [list(values) for values in reply.samples] == [list(WIRE)] * 2
    for values, expected in zip(reply.samples, given, strict=True):
        for name in WIRE:
            want = getattr(expected, name)
            if WIRE[name].decoded == "list" and isinstance(want, np.ndarray):
                assert type(values[name]) is list
                assert values[name] == want.tolist()
            elif isinstance(want, np.ndarray):
                assert values[name].dtype == np.int32
                assert np.array_equal(values[name], want)
            else:
                assert values[name] == want
        assert type(values["status"]) is Status
    assert reply.session_metadata == {"accumulated_token_ids": [1, 2], "max_trim_tokens": 1}
    assert reply.empty_reason is None


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("reason", ["no_records", "all_truncated"])
def test_an_empty_reply_says_why(contract: int, reason: str) -> None:
    """No samples, the reason, and the session's tokens all the same."""
    payload = encode_samples([], session([4, 5]), reason, contract=contract)
    reply = decode_samples(payload, contract=contract)
    assert (reply.samples, reply.empty_reason) == ([], reason)
    assert reply.session_metadata["accumulated_token_ids"] == [4, 5]


def test_absent_tensor_fields_decode_to_the_tables_null() -> None:
    """A tensor field that is None is named in `nulls`; tokens become [], the others None."""
    empty = sample(tokens=None, response_length=0, loss_mask=None, rollout_log_probs=None)
    [values] = decode_samples(encode_samples([empty], session())).samples
    assert values["tokens"] == []
    assert values["loss_mask"] is values["rollout_log_probs"] is values["rollout_routed_experts"] is None


def test_equal_arguments_give_equal_bytes() -> None:
    """The payload depends on values only: not on dtypes that are converted, on strides or on the call."""
    one = sample(rollout_routed_experts=EXPERTS)
    equal = sample(
        tokens=one.tokens.astype(np.int64)[::-1].copy()[::-1],
        loss_mask=[True, False, True],
        rollout_log_probs=np.array([-0.5, 0, -0.25], np.float32),
        rollout_routed_experts=np.asfortranarray(EXPERTS),
    )
    payload = encode_samples([one], session())
    assert payload == encode_samples([one], session()) == encode_samples([equal], session())


@pytest.mark.parametrize(
    "array",
    [
        EXPERTS[:, ::-1],
        np.asfortranarray(EXPERTS),
        EXPERTS.T.copy().T,
        np.repeat(EXPERTS, 2, axis=2)[:, :, ::2],
        np.broadcast_to(np.int32(3), (4, 2, 2)),
    ],
    ids=["reversed", "fortran", "transposed", "strided", "broadcast"],
)
def test_arrays_in_any_memory_order_are_carried_in_theirs(array: np.ndarray) -> None:
    """A view that is not contiguous is written by its values, not by its memory."""
    [values] = decode_samples(encode_samples([sample(rollout_routed_experts=array)], session())).samples
    assert np.array_equal(values["rollout_routed_experts"], array)


@pytest.mark.parametrize("contract", [1, 2])
def test_session_tokens_in_any_memory_order(contract: int) -> None:
    """A strided `accumulated_token_ids` is written by its values in both versions."""
    metadata = {"accumulated_token_ids": np.arange(10, dtype=np.int32)[::-2], "max_trim_tokens": 0}
    reply = decode_samples(encode_samples([sample()], metadata, contract=contract), contract=contract)
    assert reply.session_metadata["accumulated_token_ids"] == [9, 7, 5, 3, 1]


UNFIT: dict[str, dict[str, Any]] = {
    "a mask of -1 does not wrap": {"loss_mask": np.array([-1, 0, 1])},
    "a mask of 256 does not wrap": {"loss_mask": [256, 0, 1]},
    "a mask of 0.5 is not cut": {"loss_mask": [0.5, 0, 1]},
    "a mask of NaN": {"loss_mask": [float("nan"), 0, 1]},
    "a mask with None": {"loss_mask": [None, 0, 1]},
    "a ragged mask": {"loss_mask": [[1], [0, 1]]},
    "a token above int64": {"tokens": np.array([2**63], np.uint64)},
    "a token far above int64": {"tokens": [2**70]},
    "a token of 1.5": {"tokens": [1.5]},
    "a token as text": {"tokens": ["seven"]},
    "a complex log-prob": {"rollout_log_probs": [1 + 2j]},
    "a log-prob as text": {"rollout_log_probs": ["-0.5x", "0", "0"]},
    "log-probs as the text of numbers": {"rollout_log_probs": ["-0.5", "0.0", "-1.0"]},
    "log-probs of booleans": {"rollout_log_probs": [False, False, False]},
    "tokens of booleans": {"tokens": [True, True, False, True, True]},
    "experts of int64": {"rollout_routed_experts": EXPERTS.astype(np.int64)},
    "experts of uint8": {"rollout_routed_experts": EXPERTS.astype(np.uint8)},
    "experts of the other byte order": {"rollout_routed_experts": EXPERTS.astype(">i4")},
    "experts as lists": {"rollout_routed_experts": EXPERTS.tolist()},
    "top-k of float32": {"rollout_indexer_topk": EXPERTS.astype(np.float32)},
    "a reward of NaN": {"reward": float("nan")},
    "a reward of numpy's infinity": {"reward": {"score": np.float64("inf")}},
    "NaN deep in the metadata": {"metadata": {"a": [{"b": float("-inf")}]}},
    "metadata that is not JSON": {"metadata": {"a": {1, 2}}},
    "metadata with a number for a key": {"metadata": {1: 2}},
    "metadata with an integer above 64 bits": {"metadata": {"a": 2**70}},
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
def test_a_value_that_would_change_is_not_carried(case: str) -> None:
    """Strict fields are never converted, the others only without loss; the error names the place."""
    with pytest.raises(MalformedSamples, match=r"sample 1|_samples_meta"):
        encode_samples([sample(), sample(**UNFIT[case])], session())


def test_float32_log_probs_are_carried_exactly() -> None:
    """Every float32 has its float64, so that narrower log-probs come back bit by bit."""
    given = np.array([-0.1, -0.0, -3e38], np.float32)
    [values] = decode_samples(encode_samples([sample(rollout_log_probs=given)], session())).samples
    assert np.array(values["rollout_log_probs"]).tobytes() == given.astype(np.float64).tobytes()


NAN, INF = float("nan"), float("inf")
IMPOSSIBLE: dict[str, tuple[str, dict[str, Any]]] = {
    "a short mask": ("loss_mask of sample 1 must have length 3, not 2", {"loss_mask": [1, 0]}),
    "a long mask": ("loss_mask of sample 1 must have length 3, not 4", {"loss_mask": [1, 0, 1, 1]}),
    "a mask of 2": ("loss_mask of sample 1 holds 2", {"loss_mask": [1, 0, 2]}),
    "a nested mask": ("loss_mask of sample 1 must have 1 dimension,", {"loss_mask": [[1], [0], [1]]}),
    "short log-probs": (
        "rollout_log_probs of sample 1 must have length 3, not 2: it has 5 tokens and response_length 3",
        {"rollout_log_probs": [-0.5, 0.0]},
    ),
    "no log-probs": (
        "rollout_log_probs of sample 1 must have length 3, not 0",
        {"rollout_log_probs": []},
    ),
    "a log-prob of NaN": (
        "rollout_log_probs of sample 1 holds nan at 2",
        {"rollout_log_probs": [-0.5, 0.0, NAN]},
    ),
    "a log-prob of infinity": (
        "rollout_log_probs of sample 1 holds inf at 0",
        {"rollout_log_probs": [INF, 0.0, 0.0]},
    ),
    "a log-prob of -infinity": (
        "rollout_log_probs of sample 1 holds -inf at 1",
        {"rollout_log_probs": [-0.5, -INF, NAN]},
    ),
    "a log-prob that is a probability": (
        "rollout_log_probs of sample 1 holds 0.011 at 2; log-probs are finite and at most 0.01",
        {"rollout_log_probs": [-0.5, 0.0, 0.011]},
    ),
    "a negative id": ("tokens of sample 1 holds the negative id -1 at 3", {"tokens": [1, 2, 3, -1, -2]}),
    "nested tokens": ("tokens of sample 1 must have 1 dimension,", {"tokens": [[1, 2, 3, 4, 5]]}),
    "fewer tokens than response": (
        "response_length of sample 1 must be an integer from 0 to 2, its number of tokens, not 3",
        {"tokens": [1, 2]},
    ),
    **{
        f"a response_length of {length}": (
            f"loss_mask of sample 1 must have length {length}, not 3",
            {"response_length": length},
        )
        for length in (0, 2, 4)
    },
    **{
        f"a response_length of {length!r}": ("response_length of sample 1", {"response_length": length})
        for length in (-1, 6, 3.0, True, "3", None, [3])
    },
    "a row of experts too few": (
        "rollout_routed_experts of sample 1 must have length 4, not 3",
        {"rollout_routed_experts": EXPERTS[:3]},
    ),
    "a row of the indexer too many": (
        "rollout_indexer_topk of sample 1 must have length 4, not 5",
        {"rollout_indexer_topk": np.zeros((5, 1, 2), np.int32)},
    ),
    "experts without a layer": (
        "rollout_routed_experts of sample 1 must have 3 dimensions,",
        {"rollout_routed_experts": EXPERTS[:, 0]},
    ),
}
"""What is wrong, and the fields of a sample that no rollout can have given."""


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_an_impossible_sample_is_neither_written_nor_read(case: str, contract: int) -> None:
    """One rule for both sides, whose error names field and sample."""
    message, changes = IMPOSSIBLE[case]
    with pytest.raises(MalformedSamples, match=message):
        encode_samples([sample(), sample(**changes)], session(), contract=contract)
    payload = encode_samples([sample(), sample()], session(), contract=contract)
    content, tensors = unpack(payload)
    for name, value in changes.items():
        if name in TENSOR_FIELDS:
            content["samples"][1]["nulls"] = [n for n in content["samples"][1]["nulls"] if n != name]
            tensors[f"{name}.1"] = np.asarray(value, WIRE[name].dtype)
        else:
            content["samples"][1][name] = value
    with pytest.raises(MalformedSamples, match=message):
        decode_samples(pack(content, tensors), contract=contract)


POSSIBLE: dict[str, dict[str, Any]] = {
    "nothing at all": {"tokens": None, "response_length": 0, "loss_mask": None, "rollout_log_probs": None},
    "a prompt without a response": {"response_length": 0, "loss_mask": [], "rollout_log_probs": []},
    "a response without a prompt": {"tokens": [1, 2, 3]},
    "a response without log-probs": {"loss_mask": None, "rollout_log_probs": None},
    "a log-prob that was rounded up": {"rollout_log_probs": [0.01, 0.0, -0.0]},
    "a log-prob of next to nothing": {"rollout_log_probs": [-1e300, 0.0, 0.0]},
    "the highest id": {"tokens": [0, 2**31 - 1, 0, 0, 0]},
    "one token, which has no row": {
        "tokens": [7],
        "response_length": 1,
        "loss_mask": [1],
        "rollout_log_probs": [-0.5],
        "rollout_routed_experts": np.zeros((0, 2, 2), np.int32),
    },
    "an indexer that chose fewer": {"rollout_indexer_topk": np.full((4, 1, 2), -1, np.int32)},
}


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("case", POSSIBLE)
def test_a_rare_but_possible_sample_is_carried(case: str, contract: int) -> None:
    """Aborted and empty samples, absent arrays and values at their bounds pass both sides."""
    payload = encode_samples([sample(**POSSIBLE[case])], session(), contract=contract)
    [values] = decode_samples(payload, contract=contract).samples
    for name, value in POSSIBLE[case].items():
        expected = WIRE[name].null() if value is None else value
        assert np.array_equal(values[name], expected) if expected is not None else values[name] is None


@pytest.mark.parametrize("contract", [1, 2])
def test_a_signalling_nan_is_no_warning(contract: int) -> None:
    """A NaN of any bits off the network is refused like the others, and not by a warning of numpy's."""
    content, tensors = unpack(encode_samples([sample()], session(), contract=contract))
    tensors["rollout_log_probs.0"] = np.full(3, 0x7FF0000000000001, np.uint64).view(np.float64)
    with pytest.raises(MalformedSamples, match="holds nan at 0"):
        decode_samples(pack(content, tensors), contract=contract)


def test_negative_ids_of_the_session_are_refused() -> None:
    """`accumulated_token_ids` are ids like those of a sample; contract 1 reads the JSON of any server."""
    for contract in (1, 2):
        with pytest.raises(MalformedSamples, match="accumulated_token_ids holds the negative id -1 at 1"):
            encode_samples([sample()], session([1, -1]), contract=contract)
    content, tensors = unpack(encode_samples([sample()], session([1]), contract=2))
    with pytest.raises(MalformedSamples, match=f"{ACCUMULATED} holds the negative id -7 at 0"):
        decode_samples(pack(content, {**tensors, ACCUMULATED: np.array([-7])}), contract=2)


def _meta(**values: Any) -> Callable[[Any, Any], None]:
    return lambda content, _: _set(content, values)


def _first(**values: Any) -> Callable[[Any, Any], None]:
    return lambda content, _: _set(content["samples"][0], values)


def _tensor(**arrays: Any) -> Callable[[Any, Any], None]:
    return lambda _, tensors: _set(tensors, {k.replace("__", "."): v for k, v in arrays.items()})


def _set(target: dict[str, Any], values: dict[str, Any]) -> None:
    for name, value in values.items():
        if value is ...:
            del target[name]
        else:
            target[name] = value


BROKEN: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "samples missing": ("samples", _meta(samples=...)),
    "samples an object": ("samples", _meta(samples={})),
    "session_metadata missing": ("session_metadata", _meta(session_metadata=...)),
    "session_metadata a list": ("session_metadata", _meta(session_metadata=[])),
    "empty_reason missing": ("empty_reason", _meta(empty_reason=...)),
    "empty_reason a number": ("empty_reason", _meta(empty_reason=1)),
    "a sample that is no object": ("nulls of sample 0", _meta(samples=[[]])),
    "nulls missing": ("nulls of sample 0", _first(nulls=...)),
    "nulls an object": ("nulls of sample 0", _first(nulls={})),
    "nulls of a json field": ("'response'", _first(nulls=["response"])),
    "nulls of an unknown field": ("'colour'", _first(nulls=["colour"])),
    "nulls of a list": ("nulls of sample 0", _first(nulls=[[]])),
    "nulls of a tensor that is there": (
        "unreferenced tensors: loss_mask.0",
        _first(nulls=["loss_mask", "rollout_indexer_topk"]),
    ),
    "a tensor missing": ("loss_mask of sample 0 is missing", _tensor(loss_mask__0=...)),
    "an unknown tensor": ("unreferenced tensors: extra", _tensor(extra=np.zeros(1))),
    "a tensor of a sample that is not there": ("tokens.1", _tensor(tokens__1=np.zeros(1, np.int64))),
    "a tensor of a json field": ("status.0", _tensor(status__0=np.zeros(1))),
    "tokens of int32": ("tokens of sample 0 must", _tensor(tokens__0=np.zeros(5, np.int32))),
    "mask of int64": ("loss_mask of sample 0 must", _tensor(loss_mask__0=np.zeros(3, np.int64))),
    "mask of bool": ("loss_mask of sample 0 must", _tensor(loss_mask__0=np.zeros(3, np.bool_))),
    "log-probs of float32": ("rollout_log_probs", _tensor(rollout_log_probs__0=np.zeros(3, np.float32))),
    "experts of uint8": (
        "rollout_routed_experts",
        _tensor(rollout_routed_experts__0=np.zeros((4, 2, 2), np.uint8)),
    ),
    "metadata a list": ("metadata of sample 0", _first(metadata=[])),
    "metadata null": ("metadata of sample 0", _first(metadata=None)),
    "status unknown": ("'pending'", _first(status="pending")),
    "status null": ("status of sample 0", _first(status=None)),
    "status a list": ("status of sample 0", _first(status=[])),
    **{
        f"{name} missing": (f"{name} of sample 0 is missing", _first(**{name: ...}))
        for name in sorted(WIRE.keys() - TENSOR_FIELDS - OPTIONAL_FIELDS)
    },
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_reader_refuses(case: str) -> None:
    """A payload that breaks the contract is an error that names the place, never a guess."""
    message, damage = BROKEN[case]
    content, tensors = unpack(encode_samples([sample(rollout_routed_experts=EXPERTS)], session()))
    damage(content, tensors)
    with pytest.raises(MalformedSamples, match=message):
        decode_samples(pack(content, tensors))


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        (None, "is missing"),
        (np.zeros((1, 2), np.uint8), "must be uint8"),
        (np.zeros(2, np.int8), "must be uint8"),
        (np.frombuffer(b"{", np.uint8), "not JSON"),
        (np.frombuffer(b"\xff", np.uint8), "not JSON"),
        (np.frombuffer(b"[]", np.uint8), "not an object"),
        (np.frombuffer(b"[" * 5000 + b"]" * 5000, np.uint8), "not JSON"),
        (np.zeros(0, np.uint8), "not JSON"),
    ],
    ids=["missing", "two dimensions", "int8", "damaged", "not UTF-8", "a list", "nested deeply", "empty"],
)
def test_a_reader_refuses_a_bad_meta_tensor(meta: np.ndarray | None, message: str) -> None:
    """The meta tensor must be there, be uint8[n] and hold a JSON object."""
    tensors = {"x": np.zeros(1)} if meta is None else {META: meta}
    with pytest.raises(MalformedSamples, match=message):
        decode_samples(safetensors.numpy.save(tensors))


def _container(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"abc",
        b'{"error": {}}',
        b"\xff" * 20,
        _container(b"{"),
        _container(b'{"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', b"short"),
        _container(b'{"a":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}', b"x"),
        _container(b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"x"),
    ],
    ids=["empty", "short", "json", "huge header", "bad header", "cut", "odd dtype", "bad shape"],
)
def test_a_reader_refuses_what_is_no_container(payload: bytes) -> None:
    """Bytes that are not a safetensors container are one kind of error, whatever the library raises."""
    with pytest.raises(MalformedSamples, match="not a safetensors container"):
        decode_samples(payload)


def test_a_payload_cut_anywhere_is_refused() -> None:
    """A reply that broke off is never taken for a whole one."""
    payload = encode_samples([sample()], session())
    for length in range(0, len(payload), 7):
        with pytest.raises(MalformedSamples):
            decode_samples(payload[:length])


REPLAY_FIELDS = ("rollout_routed_experts", "rollout_indexer_topk")


def _with_rows(**rows: np.ndarray) -> Sample:
    """A sample of as many tokens as these routing replay rows need."""
    [count] = {len(array) for array in rows.values()}
    response = {"response_length": 1, "loss_mask": [1], "rollout_log_probs": [-0.5]}
    return sample(tokens=np.arange(count + 1), **response, **rows)


def _replay(*numbers: int) -> np.ndarray:
    """int32[n, 1, 2] that holds these numbers."""
    return np.array([[[n, 0]] for n in numbers], np.int32).reshape(-1, 1, 2)


@pytest.mark.parametrize("field", REPLAY_FIELDS)
@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([], "uint8"),
        ([0], "uint8"),
        ([1, 255], "uint8"),
        ([256], "uint16"),
        ([255, 65_535, 3], "uint16"),
        ([65_536], "int32"),
        ([-1], "int32"),
        ([-1, 255], "int32"),
        ([2**31 - 1, -(2**31)], "int32"),
    ],
    ids=repr,
)
def test_contract_2_carries_replay_rows_as_small_as_they_fit(
    field: str, numbers: list[int], dtype: str
) -> None:
    """The largest and smallest number decide the dtype on the wire; the decoded value is int32 and equal."""
    payload = encode_samples([_with_rows(**{field: _replay(*numbers)})], session(), contract=2)
    assert unpack(payload)[1][f"{field}.0"].dtype == dtype
    [values] = decode_samples(payload, contract=2).samples
    assert values[field].dtype == np.int32
    assert values[field].shape == (len(numbers), 1, 2)
    assert np.array_equal(values[field], _replay(*numbers))


def test_contract_2_chooses_the_dtype_for_each_tensor() -> None:
    """One sample's wide numbers make no other tensor wider."""
    first = _with_rows(rollout_routed_experts=_replay(1), rollout_indexer_topk=_replay(300))
    second = _with_rows(rollout_routed_experts=_replay(-1), rollout_indexer_topk=_replay(2))
    _, tensors = unpack(encode_samples([first, second], session(), contract=2))
    dtypes = [tensors[f"{field}.{i}"].dtype for i in (0, 1) for field in REPLAY_FIELDS]
    assert dtypes == [np.uint8, np.uint16, np.int32, np.uint8]


def test_contract_2_narrows_nothing_else() -> None:
    """Log-probs stay float64, the session's tokens int64, and a reader takes tokens in no other dtype."""
    content, tensors = unpack(encode_samples([sample()], session([1]), contract=2))
    assert {name: str(tensor.dtype) for name, tensor in tensors.items()} == {
        "tokens.0": "int32",
        "loss_mask.0": "uint8",
        "rollout_log_probs.0": "float64",
        ACCUMULATED: "int64",
    }
    with pytest.raises(MalformedSamples, match="tokens of sample 0"):
        decode_samples(pack(content, {**tensors, "tokens.0": tensors["tokens.0"].astype("u1")}), contract=2)


@pytest.mark.parametrize(("token", "dtype"), [(0, "int32"), (2**31 - 1, "int32"), (2**31, "int64")])
def test_contract_2_narrows_token_ids_that_fit(token: int, dtype: str) -> None:
    """Ids travel as int32 as long as none is changed, and come back as they were."""
    payload = encode_samples([sample(tokens=np.array([1, 2, 3, 4, token]))], session(), contract=2)
    assert str(unpack(payload)[1]["tokens.0"].dtype) == dtype
    assert decode_samples(payload, contract=2).samples[0]["tokens"] == [1, 2, 3, 4, token]


@pytest.mark.parametrize("array", [np.asfortranarray(EXPERTS), EXPERTS[::-1], EXPERTS[:, ::-1] + 300])
def test_contract_2_narrows_arrays_in_any_memory_order(array: np.ndarray) -> None:
    """A view is narrowed by its values; equal values give equal bytes."""
    payload = encode_samples([sample(rollout_routed_experts=array)], session(), contract=2)
    [values] = decode_samples(payload, contract=2).samples
    assert np.array_equal(values["rollout_routed_experts"], array)
    copied = sample(rollout_routed_experts=np.array(array.tolist(), np.int32))
    assert encode_samples([copied], session(), contract=2) == payload


def test_encoding_leaves_the_samples_rows_as_they_are() -> None:
    """The sample keeps its int32 array, so that it can be encoded for the other contract too."""
    one = sample(rollout_routed_experts=EXPERTS)
    encode_samples([one], session(), contract=2)
    assert one.rollout_routed_experts is EXPERTS
    assert EXPERTS.dtype == np.int32
    assert EXPERTS.ravel().tolist() == list(range(16))


@pytest.mark.parametrize("numbers", [[], [1], [300], [70_000], [-1]], ids=repr)
def test_contract_1_carries_replay_rows_as_int32(numbers: list[int]) -> None:
    """Existing drivers read int32, however small the numbers are."""
    given = _with_rows(rollout_routed_experts=_replay(*numbers), rollout_indexer_topk=_replay(*numbers))
    _, tensors = unpack(encode_samples([given], session(), contract=1))
    assert [tensors[f"{field}.0"].dtype for field in REPLAY_FIELDS] == [np.int32, np.int32]


@pytest.mark.parametrize("contract", [1, 2])
@pytest.mark.parametrize("dtype", ["u1", "u2", "i8", "u4", "i2", ">i4", "f4"])
def test_replay_rows_are_given_as_int32(contract: int, dtype: str) -> None:
    """The sample's own rows must be int32 in both contracts, also where a narrower dtype is sent."""
    given = sample(rollout_indexer_topk=EXPERTS.astype(dtype))
    with pytest.raises(MalformedSamples, match="rollout_indexer_topk of sample 0 must have dtype int32"):
        encode_samples([given], session(), contract=contract)


NARROW_DTYPES = {1: ("int32",), 2: ("uint8", "uint16", "int32")}
ALL_DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "bool")


@pytest.mark.parametrize("field", REPLAY_FIELDS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
@pytest.mark.parametrize("contract", [1, 2])
def test_replay_rows_are_read_in_the_contracts_dtypes_only(contract: int, dtype: str, field: str) -> None:
    """Contract 1 takes int32, contract 2 also uint8 and uint16; any other tensor is refused by its name."""
    content, tensors = unpack(encode_samples([sample(**{field: EXPERTS})], session(), contract=contract))
    payload = pack(content, {**tensors, f"{field}.0": EXPERTS.astype(dtype)})
    if dtype in NARROW_DTYPES[contract]:
        [values] = decode_samples(payload, contract=contract).samples
        assert values[field].dtype == np.int32
        assert np.array_equal(values[field], EXPERTS)
    else:
        with pytest.raises(MalformedSamples, match=f"{field} of sample 0 must have dtype .*{dtype}"):
            decode_samples(payload, contract=contract)


def test_contract_1_takes_additional_json() -> None:
    """JSON keys that this version does not know are ignored, and optional ones may be absent."""
    content, tensors = unpack(encode_samples([sample()], session()))
    content["future"] = 1
    content["samples"][0]["future"] = 1
    content["session_metadata"]["future"] = 1
    del content["samples"][0]["spec_info"], content["samples"][0]["reward"]
    reply = decode_samples(pack(content, tensors))
    assert "future" not in reply.samples[0]
    assert not {"spec_info", "reward"} & reply.samples[0].keys()
    assert reply.session_metadata["future"] == 1


def test_contract_1_carries_the_sessions_tokens_as_json() -> None:
    """Existing drivers find `accumulated_token_ids` in the JSON and no tensor that they do not know."""
    content, tensors = unpack(encode_samples([sample()], session()))
    assert content["session_metadata"]["accumulated_token_ids"] == [10, 11, 12, 13, 14]
    assert set(tensors) == {"tokens.0", "loss_mask.0", "rollout_log_probs.0"}


@pytest.mark.parametrize(
    ("count", "ids", "sent"),
    [(1, [10, 11, 12, 13, 14], False), (1, [10, 11], True), (2, [10, 11, 12, 13, 14], True), (0, [], True)],
    ids=["equal to the only sample", "longer or shorter", "several samples", "no sample"],
)
def test_contract_2_sends_the_sessions_tokens_only_where_they_differ(
    count: int, ids: list[int], sent: bool
) -> None:
    """Equal to the only sample's tokens they are left out, else they are a tensor; never JSON."""
    payload = encode_samples([sample()] * count, session(ids), contract=2)
    content, tensors = unpack(payload)
    assert "accumulated_token_ids" not in content["session_metadata"]
    assert (ACCUMULATED in tensors) is sent
    assert decode_samples(payload, contract=2).session_metadata["accumulated_token_ids"] == ids


def test_the_caller_keeps_its_session_metadata() -> None:
    """Encoding takes nothing out of the mapping that it was given."""
    metadata = session()
    encode_samples([sample()], metadata, contract=2)
    assert set(metadata) == {"accumulated_token_ids", "max_trim_tokens"}


def test_a_payload_of_the_other_version_is_refused() -> None:
    """Contract 1 is not read as 2, where the session's tokens would be taken from the sample."""
    with pytest.raises(MalformedSamples, match="not contract 2"):
        decode_samples(encode_samples([sample()], session([1])), contract=2)
    with pytest.raises(MalformedSamples, match="tokens of sample 0 must have dtype int64"):
        decode_samples(encode_samples([sample()], session([1]), contract=2), contract=1)


@pytest.mark.parametrize(
    "array", [np.zeros(2, np.int32), np.zeros((1, 2), np.int64)], ids=["dtype", "dimensions"]
)
def test_contract_2_refuses_a_wrong_tensor_of_the_sessions_tokens(array: np.ndarray) -> None:
    """`_accumulated_token_ids` must be int64[T]."""
    content, tensors = unpack(encode_samples([sample()], session([1]), contract=2))
    with pytest.raises(MalformedSamples, match="int64"):
        decode_samples(pack(content, {**tensors, ACCUMULATED: array}), contract=2)


def test_contract_2_misses_the_sessions_tokens() -> None:
    """With several samples the tensor must be there."""
    content, tensors = unpack(encode_samples([], session([1]), contract=2))
    del tensors[ACCUMULATED]
    with pytest.raises(MalformedSamples, match=ACCUMULATED):
        decode_samples(pack(content, tensors), contract=2)


@pytest.mark.parametrize("contract", [0, 3])
def test_unknown_versions_are_neither_written_nor_read(contract: int) -> None:
    """A version outside `SUPPORTED_CONTRACTS` is an error on both sides."""
    with pytest.raises(ValueError, match="is none of"):
        encode_samples([], session(), "no_records", contract=contract)
    with pytest.raises(ValueError, match="is none of"):
        decode_samples(encode_samples([], session(), "no_records"), contract=contract)


def test_the_table_has_a_row_for_every_field_in_the_fields_order() -> None:
    """The table and the sample name the same fields, and every tensor row has a dtype."""
    assert sorted(WIRE) == sorted(f.name for f in fields(Sample))
    assert all((row.dtype is not None) == (row.carried == "tensor") for row in WIRE.values())


def test_a_field_without_a_row_is_an_error_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """A computed field that the table does not carry stops the program at import; it is never dropped."""
    source = Path(str(samples.__file__)).read_text()
    field = "    reward: float | dict[str, Any] | None = None"
    assert source.count(field) == 1
    module = types.ModuleType("samples_with_one_field_more")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(RuntimeError, match="colour"):
        exec(source.replace(field, field + "\n    colour: int = 0"), module.__dict__)  # noqa: S102


@pytest.mark.parametrize("beyond", [0, 1])
def test_the_values_of_a_field(monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    """A field holds as many values as the limit, itself and its containers included, and not one more."""
    monkeypatch.setattr(limits, "SAMPLE_VALUES", 12)
    given = [sample(metadata={"a": [None] * (10 + beyond)})]
    if beyond:
        with pytest.raises(MalformedSamples, match="holds itself, or more than 12 values"):
            encode_samples(given, session(), contract=2)
    else:
        assert encode_samples(given, session(), contract=2)
