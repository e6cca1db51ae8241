"""The samples wire format: one safetensors container per reply.

The container holds a tensor `_samples_meta`, uint8[n], which is UTF-8 JSON:

    {"samples": [{<json fields>, "nulls": [<absent tensor fields>]}, …],
     "session_metadata": {…}, "empty_reason": null | "no_records" | "all_truncated"}

and, for sample number `i`, one tensor `<field>.<i>` for each tensor field of `WIRE` that is not in `nulls`.
`WIRE` is the whole contract: it drives both sides, and a `Sample` field without a row in it is an error at
import. Contract 1 is the layout of the Miles session server, whose drivers ignore unknown JSON keys but not
unknown tensors.

Contract 2 takes `accumulated_token_ids` out of the JSON: if it equals the only sample's `tokens` it is not
sent again, else it travels as the tensor `_accumulated_token_ids`, int64[T]. A sample's token ids travel as
int32 if they fit, and routing replay rows, which are nearly all bytes of a mixture-of-experts sample, in the
smallest of uint8, uint16 and int32 that holds them; the decoded values are the same.

Neither side passes on what no rollout can have given (`_ensure_possible`): arrays of other lengths than the
sample's, a negative id, a log-prob that is none.

Shapes: `T` tokens of a sample, `R` tokens of its response, `L` layers, `K` experts per token.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Final, Literal

import numpy as np
import orjson
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from tokentape_contracts import limits
from tokentape_contracts.tokens import first_bad_id, first_bad_log_prob

SUPPORTED_CONTRACTS: Final = (1, 2)
META: Final = "_samples_meta"
ACCUMULATED: Final = "_accumulated_token_ids"

_IDS: Final[tuple[np.dtype[Any], ...]] = tuple(map(np.dtype, ("<i4", "<i8")))
_ROWS: Final[tuple[np.dtype[Any], ...]] = tuple(map(np.dtype, ("u1", "<u2", "<i4")))
"""The dtypes of token ids and of routing replay rows in contract 2."""


class Status(StrEnum):
    """How a sample ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(slots=True, kw_only=True, eq=False)
class Sample:
    """What the server computes of one training sample.

    Attributes:
        tokens: int[T], prompt and response.
        response: the response's text, decoded piece by piece.
        response_length: R.
        loss_mask: uint8[R], 1 on sampled tokens, 0 on those that the environment inserted.
        rollout_log_probs: float64[R], 0.0 where the mask is 0.
        rollout_routed_experts: int32[T - 1, L, K], or None.
        rollout_indexer_topk: int32[T - 1, L, K], or None.
        status: of the last merged turn.
        weight_versions: the engine's weight version of each merged turn that had one.
        prefix_cache_info: `cached_tokens` and `total_prompt_tokens`, added up over the turns.
        spec_info: speculative-decoding counters, added up; empty without speculative decoding.
        metadata: what is merged into the input sample's metadata.
        reward: None leaves the input sample's.
    """

    tokens: NDArray[np.integer[Any]]
    response: str
    response_length: int
    loss_mask: NDArray[np.integer[Any]]
    rollout_log_probs: NDArray[np.float64]
    status: Status
    rollout_routed_experts: NDArray[np.int32] | None = None
    rollout_indexer_topk: NDArray[np.int32] | None = None
    weight_versions: list[str] = field(default_factory=list)
    prefix_cache_info: dict[str, int] = field(default_factory=dict)
    spec_info: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    reward: float | dict[str, Any] | None = None


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Wire:
    """One row of the contract.

    Attributes:
        carried: as a tensor of its own, or in the JSON.
        dtype: of the tensor on the wire.
        strict: the value must have that dtype already; others are converted if that changes no value.
        narrow: the dtypes of which, from contract 2 on, it travels in the first that holds it.
        decoded: what the driver gets: a Python list or a numpy array.
        null: makes the decoded value of a field that is listed in `nulls`.
    """

    carried: Literal["tensor", "json"]
    dtype: np.dtype[Any] | None = None
    strict: bool = False
    narrow: tuple[np.dtype[Any], ...] = ()
    decoded: Literal["list", "array"] = "list"
    null: Callable[[], Any] = _nothing


WIRE: Final[Mapping[str, Wire]] = {
    "tokens": Wire("tensor", np.dtype("<i8"), narrow=_IDS, null=list),
    "response": Wire("json"),
    "response_length": Wire("json"),
    "loss_mask": Wire("tensor", np.dtype("u1")),
    "rollout_log_probs": Wire("tensor", np.dtype("<f8")),
    "rollout_routed_experts": Wire("tensor", np.dtype("<i4"), strict=True, narrow=_ROWS, decoded="array"),
    "rollout_indexer_topk": Wire("tensor", np.dtype("<i4"), strict=True, narrow=_ROWS, decoded="array"),
    "status": Wire("json"),
    "weight_versions": Wire("json"),
    "prefix_cache_info": Wire("json"),
    "spec_info": Wire("json"),
    "metadata": Wire("json"),
    "reward": Wire("json"),
}

TENSOR_FIELDS: Final = frozenset(name for name, row in WIRE.items() if row.carried == "tensor")
OPTIONAL_FIELDS: Final = frozenset({"spec_info", "reward"})
"""JSON fields that other servers of contract 1 may leave out; the input sample's value stays then."""

if WIRE.keys() != {f.name for f in fields(Sample)}:
    raise RuntimeError(f"not on the wire: {WIRE.keys() ^ {f.name for f in fields(Sample)}}")


class MalformedSamples(ValueError):
    """A value cannot be carried, or a payload breaks the contract; names the field and the sample."""


@dataclass(frozen=True, slots=True)
class SamplesReply:
    """A decoded reply.

    Attributes:
        samples: field → value for each sample, in the server's order.
        session_metadata: about the whole session; always has `accumulated_token_ids` and `max_trim_tokens`.
        empty_reason: why there is no sample: `no_records`, `all_truncated`, or None.
    """

    samples: list[dict[str, Any]]
    session_metadata: dict[str, Any]
    empty_reason: str | None


def encode_samples(
    samples: Sequence[Sample],
    session_metadata: Mapping[str, Any],
    empty_reason: str | None = None,
    *,
    contract: int = 1,
) -> bytes:
    """Packs samples into one payload. Equal arguments give equal bytes (INV-9).

    Args:
        session_metadata: its `accumulated_token_ids` is an int array [T].
        contract: one of `SUPPORTED_CONTRACTS`.

    Raises:
        MalformedSamples: a value does not fit its row of `WIRE`, or is not JSON (which knows no NaN), or no
            rollout can have given the sample, as in `decode_samples`.
    """
    _ensure_supported(contract)
    tensors: dict[str, NDArray[Any]] = {}
    metas: list[dict[str, Any]] = []
    for i, sample in enumerate(samples):
        meta, arrays = _written_sample(sample, f"of sample {i}")
        metas.append(meta)
        for name, array in arrays.items():
            tensors[f"{name}.{i}"] = _narrowed(array, WIRE[name]) if contract >= 2 else array
    session = dict(session_metadata)
    if contract >= 2:
        accumulated = session.pop("accumulated_token_ids")
        if len(samples) != 1 or not np.array_equal(accumulated, samples[0].tokens):
            tensors[ACCUMULATED] = _wire_array(accumulated, WIRE["tokens"], "accumulated_token_ids")
            _ensure_ids(tensors[ACCUMULATED], "accumulated_token_ids")
    elif isinstance(session.get("accumulated_token_ids"), np.ndarray):
        session["accumulated_token_ids"] = np.ascontiguousarray(session["accumulated_token_ids"])
        _ensure_ids(session["accumulated_token_ids"], "accumulated_token_ids")
    content = {"samples": metas, "session_metadata": session, "empty_reason": empty_reason}
    try:
        json = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS)
    except TypeError as error:
        raise MalformedSamples(f"{META} cannot be JSON: {error}") from error
    tensors[META] = np.frombuffer(json, np.uint8)
    return safetensors.numpy.save(tensors)


def decode_samples(payload: bytes, *, contract: int = 1) -> SamplesReply:
    """Reads a payload.

    Args:
        contract: the version that the payload was written in.

    Raises:
        MalformedSamples: not a container; a missing or wrongly shaped meta tensor; missing `nulls`; a null
            marker for a JSON field; a missing, unreferenced or wrongly typed tensor; metadata that is not
            an object; an unknown status; a payload of another contract version; a sample that no rollout can
            have given: lengths that do not fit each other, a negative id, a mask other than 0 and 1, a
            log-prob that is not finite, or above `limits.LOGPROB_MAX`.
    """
    _ensure_supported(contract)
    try:
        tensors = safetensors.numpy.load(payload)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise MalformedSamples(f"not a safetensors container: {error}") from error
    content = _read_meta(tensors.pop(META, None))
    samples = [_read_sample(i, meta, tensors, contract) for i, meta in enumerate(content["samples"])]
    session = content["session_metadata"]
    if contract >= 2:
        if "accumulated_token_ids" in session:
            raise MalformedSamples(f"accumulated_token_ids in the JSON: not contract {contract}")
        session["accumulated_token_ids"] = _read_accumulated(tensors, samples)
    if tensors:
        raise MalformedSamples(f"unreferenced tensors: {', '.join(sorted(tensors))}")
    return SamplesReply(samples, session, content["empty_reason"])


def _ensure_supported(contract: int) -> None:
    if contract not in SUPPORTED_CONTRACTS:
        raise ValueError(f"contract {contract} is none of {SUPPORTED_CONTRACTS}")


def _written_sample(sample: Sample, where: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The JSON of a sample, and its arrays in the dtypes of `WIRE`."""
    meta: dict[str, Any] = {}
    arrays: dict[str, NDArray[Any]] = {}
    for name, row in WIRE.items():
        value = getattr(sample, name)
        if row.carried == "json":
            _ensure_finite(value, f"{name} {where}")
            meta[name] = value
        elif value is not None:
            arrays[name] = _wire_array(value, row, f"{name} {where}")
    _ensure_possible(arrays, sample.response_length, where)
    return {**meta, "nulls": [name for name in WIRE if name in TENSOR_FIELDS and name not in arrays]}, arrays


def _ensure_possible(arrays: Mapping[str, NDArray[Any]], response_length: Any, where: str) -> None:
    """Raises for a sample that no rollout can have given; one rule for writer and reader.

    Args:
        arrays: the tensor fields that are not null. A null field breaks no rule; null tokens are none.
    """
    _ensure_lengths(arrays, response_length, where)
    tokens, mask, log_probs = map(arrays.get, ("tokens", "loss_mask", "rollout_log_probs"))
    if tokens is not None:
        _ensure_ids(tokens, f"tokens {where}")
    if mask is not None and mask.size and mask.max() > 1:
        raise MalformedSamples(f"loss_mask {where} holds {mask.max()}; it must hold 0 and 1 only")
    if log_probs is not None and (bad := first_bad_log_prob(log_probs)) is not None:
        raise MalformedSamples(
            f"rollout_log_probs {where} holds {log_probs[bad]} at {bad}; log-probs are finite and at most "
            f"{limits.LOGPROB_MAX}"
        )


def _ensure_lengths(arrays: Mapping[str, NDArray[Any]], response_length: Any, where: str) -> None:
    for name, array in arrays.items():
        dimensions = 1 if WIRE[name].decoded == "list" else 3
        if array.ndim != dimensions:
            raise MalformedSamples(
                f"{name} {where} must have {dimensions} dimension{'s'[: dimensions - 1]}, not shape "
                f"{list(array.shape)}"
            )
    total = len(arrays.get("tokens", ()))
    if type(response_length) is not int or not 0 <= response_length <= total:
        raise MalformedSamples(
            f"response_length {where} must be an integer from 0 to {total}, its number of tokens, not "
            f"{response_length!r:.80}"
        )
    rows = max(total - 1, 0)
    lengths = {"tokens": total, "loss_mask": response_length, "rollout_log_probs": response_length}
    for name, array in arrays.items():
        if len(array) != (expected := lengths.get(name, rows)):
            raise MalformedSamples(
                f"{name} {where} must have length {expected}, not {len(array)}: it has {total} tokens and "
                f"response_length {response_length}"
            )


def _ensure_ids(ids: NDArray[Any], where: str) -> None:
    if (bad := first_bad_id(ids)) is not None:
        raise MalformedSamples(f"{where} holds the negative id {ids[bad]} at {bad}")


_ALWAYS_FINITE: Final = frozenset({str, int, bool, type(None)})
"""Most values of a sample's JSON: they need no closer look."""


def _ensure_finite(value: Any, where: str) -> None:
    """JSON would turn a NaN reward into null, which means "no reward". What holds itself has no JSON."""
    left, seen = [value], 1
    while left:
        value = left.pop()
        if type(value) in _ALWAYS_FINITE:
            continue
        if isinstance(value, dict | list | tuple):
            seen += len(value)
            if seen > limits.SAMPLE_VALUES:
                raise MalformedSamples(f"{where} holds itself, or more than {limits.SAMPLE_VALUES} values")
            left.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, float | np.floating) and not math.isfinite(value):
            raise MalformedSamples(f"{where} holds {value}, which JSON cannot carry")
        elif isinstance(value, np.ndarray) and value.dtype.kind == "f" and not np.isfinite(value).all():
            raise MalformedSamples(f"{where} holds an array with NaN or infinity, which JSON cannot carry")


def _wire_array(value: Any, row: Wire, where: str) -> NDArray[Any]:
    try:
        return _exact_array(value, row, where)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, MalformedSamples):
            raise
        raise MalformedSamples(f"{where} is not an array of {row.dtype}: {error}") from error


def _exact_array(value: Any, row: Wire, where: str) -> NDArray[Any]:
    array = np.asarray(value)
    if array.dtype == row.dtype:
        return np.ascontiguousarray(array)
    if row.strict:
        raise MalformedSamples(f"{where} must have dtype {row.dtype}, not {array.dtype}")
    if array.dtype.kind == "b" and row.dtype != np.uint8:
        raise MalformedSamples(f"{where} holds booleans, which are neither ids nor log-probs")
    with np.errstate(invalid="ignore"):
        wire = array.astype(row.dtype)
    if not np.array_equal(wire, array, equal_nan=array.dtype.kind == "f"):
        raise MalformedSamples(f"{where} holds values that {row.dtype} cannot")
    return np.ascontiguousarray(wire)


def _narrowed(array: NDArray[Any], row: Wire) -> NDArray[Any]:
    low, high = (int(array.min()), int(array.max())) if row.narrow and array.size else (0, 0)
    fits = (dtype for dtype in row.narrow if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max)
    return array.astype(next(fits, array.dtype), copy=False)


def _read_meta(tensor: NDArray[Any] | None) -> dict[str, Any]:
    if tensor is None:
        raise MalformedSamples(f"{META} is missing")
    if tensor.ndim != 1 or tensor.dtype != np.uint8:
        raise MalformedSamples(f"{META} must be uint8[n], not {tensor.dtype}{list(tensor.shape)}")
    try:
        content = orjson.loads(tensor.tobytes())
    except orjson.JSONDecodeError as error:
        raise MalformedSamples(f"{META} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise MalformedSamples(f"{META} is not an object")
    expected: dict[str, type | tuple[type, ...]] = {
        "samples": list,
        "session_metadata": dict,
        "empty_reason": (str, type(None)),
    }
    for name, types in expected.items():
        if name not in content or not isinstance(content[name], types):
            raise MalformedSamples(f"{META}: {name} is missing or of a wrong type")
    return content


def _read_sample(i: int, meta: Any, tensors: dict[str, NDArray[Any]], contract: int) -> dict[str, Any]:
    where = f"of sample {i}"
    nulls = meta.get("nulls") if isinstance(meta, dict) else None
    if not isinstance(nulls, list):
        raise MalformedSamples(f"nulls {where} is missing or not a list")
    if wrong := [name for name in nulls if not isinstance(name, str) or name not in TENSOR_FIELDS]:
        raise MalformedSamples(f"nulls {where} names {wrong[0]!r}, which is not a tensor field")
    values = _read_json_fields(meta, where)
    arrays: dict[str, NDArray[Any]] = {}
    for name in (name for name, row in WIRE.items() if row.carried == "tensor" and name not in nulls):
        arrays[name] = _checked_tensor(tensors.pop(f"{name}.{i}", None), name, contract, where)
    _ensure_possible(arrays, values["response_length"], where)
    for name in TENSOR_FIELDS:
        values[name] = _decoded(arrays.get(name), WIRE[name])
    return {name: values[name] for name in WIRE if name in values}


def _read_json_fields(meta: Mapping[str, Any], where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in (name for name, row in WIRE.items() if row.carried == "json"):
        if name in meta:
            values[name] = _read_json(name, meta[name], where)
        elif name not in OPTIONAL_FIELDS:
            raise MalformedSamples(f"{name} {where} is missing")
    return values


def _read_json(name: str, value: Any, where: str) -> Any:
    if name == "metadata" and not isinstance(value, dict):
        raise MalformedSamples(f"metadata {where} is not an object")
    if name == "status":
        try:
            return Status(value)
        except ValueError:
            raise MalformedSamples(f"status {where} is unknown: {value!r}") from None
    return value


def _checked_tensor(array: NDArray[Any] | None, name: str, contract: int, where: str) -> NDArray[Any]:
    """The tensor, if it is there and has a dtype of the contract."""
    row = WIRE[name]
    allowed = (row.narrow or (row.dtype,)) if contract >= 2 else (row.dtype,)
    if array is None:
        raise MalformedSamples(f"{name} {where} is missing")
    if array.dtype not in allowed:
        known = " or ".join(map(str, allowed))
        raise MalformedSamples(f"{name} {where} must have dtype {known}, not {array.dtype}")
    return array


def _decoded(array: NDArray[Any] | None, row: Wire) -> Any:
    if array is None:
        return row.null()
    return array.tolist() if row.decoded == "list" else array.astype(row.dtype, copy=False)


def _read_accumulated(tensors: dict[str, NDArray[Any]], samples: list[dict[str, Any]]) -> list[int]:
    array = tensors.pop(ACCUMULATED, None)
    if array is None and len(samples) == 1:
        return list(samples[0]["tokens"])
    if array is None or array.dtype != np.int64 or array.ndim != 1:
        raise MalformedSamples(f"{ACCUMULATED} is missing or not int64[T]")
    _ensure_ids(array, ACCUMULATED)
    ids: list[int] = array.tolist()
    return ids
