"""Short ways to write samples and damaged payloads."""

from typing import Any

import numpy as np
import orjson
import safetensors.numpy

from tokentape_contracts.samples import META, Sample, Status


def sample(**given: Any) -> Sample:
    """A sample of 5 tokens, 3 of them response; without routed experts unless told otherwise."""
    defaults: dict[str, Any] = {
        "tokens": np.array([10, 11, 12, 13, 14], np.int32),
        "response": "a b",
        "response_length": 3,
        "loss_mask": np.array([1, 0, 1], np.uint8),
        "rollout_log_probs": np.array([-0.5, 0.0, -0.25]),
        "status": Status.COMPLETED,
        "weight_versions": ["7"],
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 2},
        "metadata": {"lifecycle": {"turn": 1}},
    }
    return Sample(**{**defaults, **given})


def session(ids: Any = (10, 11, 12, 13, 14)) -> dict[str, Any]:
    """Session metadata."""
    return {"accumulated_token_ids": np.asarray(ids, np.int32), "max_trim_tokens": 1}


def unpack(payload: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A payload's JSON and its tensors."""
    tensors = safetensors.numpy.load(payload)
    return orjson.loads(tensors.pop(META).tobytes()), tensors


def pack(content: Any, tensors: dict[str, np.ndarray]) -> bytes:
    """The inverse of `unpack`."""
    return safetensors.numpy.save({**tensors, META: np.frombuffer(orjson.dumps(content), np.uint8)})
