"""One request on its way through the generator, and what comes out of it."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tokentape_engine.sampling import Sampling

Finish = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What one request generated.

    `tokens` are all sampled ids, with the one that stopped it; `logprobs` are theirs, at the request's
    temperature, and `token_versions` the versions of the weights that drew them. `weight_version` is the one
    at the end. `matched_stop` is the stop token's id or the stop string, None after `length` and `abort`.
    `cached_tokens` is how many leading prompt tokens were not computed again. `experts` are those of each
    token that the model read, from the first wanted one on: int32[prompt + output - 1 - first, L, K]; None
    when they are not wanted or nothing was read. `latency_s` counts from submission, with the wait for a
    slot.
    """

    tokens: list[int]
    logprobs: list[float]
    token_versions: list[str]
    weight_version: str
    finish: Finish
    matched_stop: int | str | None
    cached_tokens: int
    experts: Tensor | None
    latency_s: float


@dataclass(slots=True)
class Sequence:
    """A request that waits or runs; it runs as soon as it has a slot."""

    prompt: list[int]
    sampling: Sampling
    experts_from: int | None
    stop_ids: frozenset[int]
    generator: torch.Generator
    future: Future[Completion]
    submitted: float = field(default_factory=time.monotonic)
    slot: int = -1
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)

    @property
    def running(self) -> bool:
        """Whether it has left the queue."""
        return self.slot >= 0
