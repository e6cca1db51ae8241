"""Draws follow the parameters; log-probs are those before top-k and top-p."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tokentape_engine.sampling import Sampling, draw, scale

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def _drawn(**parameters: Any) -> set[int]:
    sampling = Sampling(max_tokens=1, **parameters)
    generator = torch.Generator().manual_seed(0)
    logprobs = scale(LOGITS, sampling.temperature)
    return {draw(logprobs, sampling, generator) for _ in range(300)}


def test_scale_applies_temperature() -> None:
    """Log-probs are normalised at the temperature; temperature 0 reports them at 1."""
    assert scale(LOGITS, 0.5).exp().sum().item() == pytest.approx(1)
    assert scale(LOGITS, 0.5)[0].exp().item() == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025))
    assert torch.equal(scale(LOGITS, 0), scale(LOGITS, 1))


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [
        ({}, {0, 1, 2, 3}),
        ({"temperature": 0.0}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
    ],
)
def test_draw_keeps_the_right_tokens(parameters: dict[str, Any], tokens: set[int]) -> None:
    """Exactly the tokens that top-k and then top-p leave are ever drawn."""
    assert _drawn(**parameters) == tokens


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"stop": ("",)},
        {"temperature": float("nan")},
    ],
)
def test_bad_parameters(parameters: dict[str, Any]) -> None:
    """Parameters without a meaning are refused."""
    with pytest.raises(ValueError, match="must"):
        Sampling(max_tokens=1, **parameters)
