"""From samples to the tensors of a training step.

Shapes: `B` samples, `T` the longest one's tokens, `N` the tokens of all samples together. Everything is
aligned to `tokens`, prompt included: position `t` describes token `t`, which the logits of position `t - 1`
predict.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


def collate(samples: Sequence[Any], *, pad_id: int = 0, packed: bool = False) -> "dict[str, torch.Tensor]":
    """Puts samples together, padded on the right or packed without padding.

    Padded:
        tokens           int64[B, T]    `pad_id` behind the end
        attention_mask   bool[B, T]     True on tokens
        loss_mask        uint8[B, T]    1 on sampled tokens; 0 on prompt, environment and padding
        rollout_log_probs float32[B, T] 0.0 where `loss_mask` is 0

    Packed, samples one after the other in the order given:
        tokens           int64[N]
        position_ids     int64[N]       from 0 in every sample
        loss_mask        uint8[N]
        rollout_log_probs float32[N]    0.0 where `loss_mask` is 0
        cu_seqlens       int32[B + 1]   sample b is `cu_seqlens[b]:cu_seqlens[b + 1]`
        max_seqlen       int32[]        T

    Both:
        total_lengths    int64[B]       prompt and response
        response_lengths int64[B]

    Args:
        samples: at least one; each has `tokens`, `response_length`, and `loss_mask` and `rollout_log_probs`
            of that length (None stands for length 0, as in an aborted sample).
        pad_id: unused if packed.

    Raises:
        ValueError: no samples; lengths that do not fit each other; a mask other than 0 or 1.
        ImportError: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("collate needs torch: pip install '.[torch]' in a clone of Tokentape") from error
    if not samples:
        raise ValueError("there are no samples to collate")
    rows = [_row(i, sample) for i, sample in enumerate(samples)]
    totals = np.array([len(tokens) for tokens, _, _ in rows])
    longest = int(totals.max())

    def join(parts: Sequence[NDArray[Any]], fill: int = 0) -> NDArray[Any]:
        if packed:
            return np.concatenate(parts)
        return np.stack([np.pad(part, (0, longest - len(part)), constant_values=fill) for part in parts])

    tokens, masks, log_probs = zip(*rows, strict=True)
    arrays = {
        "tokens": join(tokens, pad_id),
        "loss_mask": join(masks),
        "rollout_log_probs": join(log_probs),
        "total_lengths": totals,
        "response_lengths": np.array([sample.response_length for sample in samples]),
    }
    if packed:
        arrays["position_ids"] = np.concatenate([np.arange(total) for total in totals])
        arrays["cu_seqlens"] = np.cumsum([0, *totals], dtype=np.int32)
        arrays["max_seqlen"] = np.array(longest, np.int32)
    else:
        arrays["attention_mask"] = np.arange(longest) < totals[:, None]
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _row(i: int, sample: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.float32]]:
    """Tokens, mask and log-probs of one sample, each of the sample's whole length."""
    tokens = np.asarray(sample.tokens, np.int64)
    length = sample.response_length
    if not 0 <= length <= len(tokens):
        raise ValueError(f"sample {i}: response_length is {length}, but it has {len(tokens)} tokens")
    given = {name: _values(getattr(sample, name)) for name in ("loss_mask", "rollout_log_probs")}
    for name, values in given.items():
        if values.shape != (length,):
            raise ValueError(
                f"sample {i}: {name} must have response_length = {length} values, it has shape {values.shape}"
            )
    if not np.isin(given["loss_mask"], (0, 1)).all():
        raise ValueError(f"sample {i}: loss_mask holds other values than 0 and 1")
    mask = np.zeros(len(tokens), np.uint8)
    log_probs = np.zeros(len(tokens), np.float32)
    start = len(tokens) - length
    mask[start:] = given["loss_mask"]
    log_probs[start:] = np.where(given["loss_mask"] == 1, given["rollout_log_probs"], 0.0)
    return tokens, mask, log_probs


def _values(values: Any) -> NDArray[Any]:
    return np.asarray([] if values is None else values)
