"""`collate`: shapes, values and refusals."""

import sys
from typing import Any

import pytest
import torch

from tokentape_driver import RolloutSample, collate

A = RolloutSample(
    tokens=[5, 6, 7, 8, 9],
    response_length=3,
    loss_mask=[1, 0, 1],
    rollout_log_probs=[-0.5, -9.0, -0.25],
)
B = RolloutSample(tokens=[1, 2], response_length=1, loss_mask=[1], rollout_log_probs=[-2.0])


def as_lists(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in batch.items()}


def test_padded() -> None:
    """Padded: one row a sample, everything aligned to the tokens, log-probs 0 where the mask is 0."""
    batch = collate([A, B], pad_id=99)
    assert as_lists(batch) == {
        "tokens": [[5, 6, 7, 8, 9], [1, 2, 99, 99, 99]],
        "attention_mask": [[True] * 5, [True, True, False, False, False]],
        "loss_mask": [[0, 0, 1, 0, 1], [0, 1, 0, 0, 0]],
        "rollout_log_probs": [[0.0, 0.0, -0.5, 0.0, -0.25], [0.0, -2.0, 0.0, 0.0, 0.0]],
        "total_lengths": [5, 2],
        "response_lengths": [3, 1],
    }
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "tokens": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.uint8,
        "rollout_log_probs": torch.float32,
        "total_lengths": torch.int64,
        "response_lengths": torch.int64,
    }


def test_packed() -> None:
    """Packed: no padding, sample b between `cu_seqlens[b]` and `cu_seqlens[b + 1]`, positions from 0."""
    batch = collate([A, B], packed=True)
    assert as_lists(batch) == {
        "tokens": [5, 6, 7, 8, 9, 1, 2],
        "position_ids": [0, 1, 2, 3, 4, 0, 1],
        "loss_mask": [0, 0, 1, 0, 1, 0, 1],
        "rollout_log_probs": [0.0, 0.0, -0.5, 0.0, -0.25, 0.0, -2.0],
        "cu_seqlens": [0, 5, 7],
        "max_seqlen": 5,
        "total_lengths": [5, 2],
        "response_lengths": [3, 1],
    }
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == torch.int32
    assert batch["position_ids"].dtype == torch.int64


@pytest.mark.parametrize("packed", [False, True])
def test_aborted_samples_train_nothing(packed: bool) -> None:
    """A sample without response or tokens is carried with a mask of zeros."""
    batch = collate([RolloutSample(tokens=[4]), RolloutSample(), A], packed=packed)
    assert batch["total_lengths"].tolist() == [1, 0, 5]
    assert batch["loss_mask"].sum() == 2


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"response_length": 6}, "response_length is 6, but it has 5 tokens"),
        ({"response_length": -1}, "response_length is -1"),
        ({"loss_mask": [1, 1]}, r"loss_mask must have response_length = 3 values, it has shape \(2,\)"),
        ({"loss_mask": None}, "loss_mask must have response_length = 3"),
        ({"rollout_log_probs": [0.0] * 4}, "rollout_log_probs must have response_length = 3"),
        ({"loss_mask": [1, 0, -1]}, "loss_mask holds other values than 0 and 1"),
    ],
)
def test_inconsistent_samples(changes: dict[str, Any], match: str) -> None:
    """Lengths that do not fit and masks that are none are refused by the sample's number."""
    bad = RolloutSample(**{**vars(A), **changes})
    with pytest.raises(ValueError, match=f"sample 1: {match}"):
        collate([A, bad])


def test_no_samples() -> None:
    """Nothing cannot be collated."""
    with pytest.raises(ValueError, match="no samples"):
        collate([])


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[torch\]' in a clone"):
        collate([A])
