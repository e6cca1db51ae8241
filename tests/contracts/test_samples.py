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
from tokentape_contracts import samples
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
    empty = sample(tokens=None, loss_mask=None, rollout_log_probs=None)
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
    "a log-prob as text": {"rollout_log_probs": ["-0.5x"]},
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


def test_nan_log_probs_are_carried_as_they_are() -> None:
    """The codec judges no log-prob: NaN and infinities come back bit by bit, also from float32.

    That every recorded log-prob is finite is checked where a turn is recorded.
    """
    given = np.array([np.nan, -np.inf, -0.0], np.float32)
    [values] = decode_samples(encode_samples([sample(rollout_log_probs=given)], session())).samples
    assert np.array(values["rollout_log_probs"]).tobytes() == given.astype(np.float64).tobytes()


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
        "unreferenced tensors: tokens.0",
        _first(nulls=["tokens", "rollout_indexer_topk"]),
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
    payload = encode_samples([sample(**{field: _replay(*numbers)})], session(), contract=2)
    assert unpack(payload)[1][f"{field}.0"].dtype == dtype
    [values] = decode_samples(payload, contract=2).samples
    assert values[field].dtype == np.int32
    assert values[field].shape == (len(numbers), 1, 2)
    assert np.array_equal(values[field], _replay(*numbers))


def test_contract_2_chooses_the_dtype_for_each_tensor() -> None:
    """One sample's wide numbers make no other tensor wider."""
    first = sample(rollout_routed_experts=_replay(1), rollout_indexer_topk=_replay(300))
    second = sample(rollout_routed_experts=_replay(-1), rollout_indexer_topk=_replay(2))
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


@pytest.mark.parametrize(("token", "dtype"), [(2**31 - 1, "int32"), (2**31, "int64"), (-(2**31), "int32")])
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
    given = sample(rollout_routed_experts=_replay(*numbers), rollout_indexer_topk=_replay(*numbers))
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
