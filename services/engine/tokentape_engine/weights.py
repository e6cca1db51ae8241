"""Weights that change: seeded noise, and the versions that tell one state from the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokentape_engine.model import Network

FIRST_VERSION = "1"
"""The version of the weights that the server started with."""


class UnknownVersionError(ValueError):
    """The present version is not a number, so it does not say which one comes next."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """A change of the weights by `perturb`, with the version that they have after it.

    Without a `version` it is the present one plus 1. `abort_all` ends every running and waiting generation
    before the change.
    """

    version: str | None = None
    seed: int = 0
    scale: float = 0.02
    abort_all: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.scale <= 1:
            raise ValueError(f"scale must be in [0, 1], got {self.scale}")


@dataclass(frozen=True, slots=True)
class Updated:
    """The weights have this version now; so many generations were aborted for it."""

    version: str
    aborted: int


@torch.no_grad()
def perturb(network: Network, seed: int, scale: float) -> None:
    """Add Gaussian noise to every weight, in place: `scale` times the root mean square of its tensor.

    Equal networks, seeds and scales give equal weights, so a second copy of a server's model can follow each
    of its updates.
    """
    draws = torch.Generator().manual_seed(seed)
    for weights in network.parameters():
        size = weights.square().mean().sqrt()
        weights.add_(scale * size * torch.randn(weights.shape, generator=draws))


def next_version(version: str) -> str:
    """The version after `version`, which must be a number.

    >>> next_version("1")
    '2'
    """
    if not version.isdecimal():
        raise UnknownVersionError(f"weight_version is needed: the present one, {version!r}, is not a number")
    return str(int(version) + 1)
