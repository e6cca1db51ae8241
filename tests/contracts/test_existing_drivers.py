"""Contract 1 read by a second implementation, written from the description of the layout alone.

It knows nothing of our table and does not import `safetensors`: what it reads is what a driver of the Miles
session server reads.
"""

import json
import struct
from typing import Any

import numpy as np

from tests.support.samples import sample, session
from tokentape_contracts.samples import Status, encode_samples

NUMPY = {"I64": np.dtype("<i8"), "U8": np.dtype("u1"), "F64": np.dtype("<f8"), "I32": np.dtype("<i4")}
TENSORS = {
    "tokens": "I64",
    "loss_mask": "U8",
    "rollout_log_probs": "F64",
    "rollout_routed_experts": "I32",
    "rollout_indexer_topk": "I32",
}
JSON = ("response", "response_length", "status", "weight_versions", "prefix_cache_info", "metadata")


def _tensors(payload: bytes) -> dict[str, tuple[str, np.ndarray]]:
    """The safetensors format: u64 header size, JSON header, then the tensors without a gap."""
    [size] = struct.unpack("<Q", payload[:8])
    header = json.loads(payload[8 : 8 + size])
    header.pop("__metadata__", None)
    data, end = payload[8 + size :], 0
    found = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        assert begin == end
        end = stop
        array = np.frombuffer(data[begin:stop], NUMPY[entry["dtype"]]).reshape(entry["shape"])
        found[name] = (entry["dtype"], array)
    assert end == len(data)
    return found


def _read(payload: bytes) -> tuple[list[dict[str, Any]], dict[str, Any], str | None]:
    tensors = _tensors(payload)
    kind, meta = tensors.pop("_samples_meta")
    assert (kind, meta.ndim) == ("U8", 1)
    content = json.loads(bytes(meta).decode("utf-8"))
    samples = []
    for index, fields in enumerate(content["samples"]):
        values = {name: fields[name] for name in JSON}
        for name, dtype in TENSORS.items():
            if name in fields["nulls"]:
                values[name] = [] if name == "tokens" else None
                continue
            found, array = tensors.pop(f"{name}.{index}")
            assert found == dtype, name
            values[name] = array
        if fields["reward"] is not None:
            values["reward"] = fields["reward"]
        samples.append(values)
    assert not tensors, "an existing driver refuses tensors that it does not know"
    return samples, content["session_metadata"], content["empty_reason"]


def test_an_existing_driver_reads_every_field() -> None:
    """All fields of contract 1 arrive, with the dtypes and shapes of its layout."""
    experts = np.arange(24, dtype=np.int32).reshape(4, 3, 2)
    given = sample(
        rollout_routed_experts=experts[::-1], rollout_indexer_topk=experts, reward=1.5, spec_info={"a": 1}
    )
    [values], metadata, empty_reason = _read(encode_samples([given], session()))
    assert values["tokens"].tolist() == [10, 11, 12, 13, 14]
    assert values["loss_mask"].tolist() == [1, 0, 1]
    assert values["rollout_log_probs"].tolist() == [-0.5, 0.0, -0.25]
    assert np.array_equal(values["rollout_routed_experts"], experts[::-1])
    assert np.array_equal(values["rollout_indexer_topk"], experts)
    assert {name: values[name] for name in JSON} == {
        "response": "a b",
        "response_length": 3,
        "status": "completed",
        "weight_versions": ["7"],
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
        "metadata": {"lifecycle": {"turn": 1}},
    }
    assert values["reward"] == 1.5
    assert metadata == {"accumulated_token_ids": [10, 11, 12, 13, 14], "max_trim_tokens": 1}
    assert empty_reason is None


def test_an_existing_driver_reads_several_samples_and_nulls() -> None:
    """Tensors are numbered by sample; an absent one is named in `nulls`."""
    empty: dict[str, Any] = {"response_length": 0, "loss_mask": None, "rollout_log_probs": None}
    given = [
        sample(),
        sample(tokens=np.array([1]), status=Status.ABORTED, **empty),
        sample(tokens=None, **empty),
    ]
    samples, _, _ = _read(encode_samples(given, session()))
    assert [list(values["tokens"]) for values in samples] == [[10, 11, 12, 13, 14], [1], []]
    assert [values["rollout_routed_experts"] for values in samples] == [None] * 3
    assert [values["status"] for values in samples] == ["completed", "aborted", "completed"]
    assert all("reward" not in values for values in samples)


def test_an_existing_driver_reads_an_empty_reply() -> None:
    """An empty reply is a whole container with its reason."""
    assert _read(encode_samples([], session([]), "no_records")) == (
        [],
        {"accumulated_token_ids": [], "max_trim_tokens": 1},
        "no_records",
    )
