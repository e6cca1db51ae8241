"""Sampling parameters, and the draw of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request wants its tokens drawn.

    `temperature` 0 means greedy: the likeliest token, with log-probs as at temperature 1. `top_k` -1 and
    `top_p` 1.0 keep the whole vocabulary. `max_tokens` bounds the output. A `seed` makes the draws
    repeatable.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0 <= self.temperature <= 100:
            raise ValueError(f"temperature must be in [0, 100], got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k must be -1 (off) or at least 1, got {self.top_k}")
        if any(not text for text in self.stop):
            raise ValueError("a stop string must not be empty")


def scale(logits: Tensor, temperature: float) -> Tensor:
    """Log-probs float32[vocab] of `logits` at `temperature`, before top-k and top-p: what is reported."""
    return torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)


def draw(logprobs: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw one token from float32[vocab] after top-k and top-p have removed the unlikely ones."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return int(logprobs.argmax())
    probabilities = logprobs.exp()
    if sampling.top_k == -1 and sampling.top_p == 1:
        return int(torch.multinomial(probabilities, 1, generator=generator))
    ordered, tokens = probabilities.sort(descending=True)
    if sampling.top_k != -1:
        ordered = ordered[: sampling.top_k]
    # A token stays while the mass before it is below top_p, so the likeliest always stays.
    before = ordered.cumsum(0) - ordered
    kept = ordered[before < sampling.top_p * ordered.sum()]
    return int(tokens[torch.multinomial(kept, 1, generator=generator)])
