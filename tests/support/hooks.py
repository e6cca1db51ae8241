"""Matchers and hooks as users write them, good and bad."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tokentape_core.domain.tree import Leaf, LeafSample, train_once

NOT_A_FUNCTION = 1


def same_role(stored: Mapping[str, Any], incoming: Mapping[str, Any]) -> bool:
    return bool(stored["role"] == incoming["role"])


def shrug(stored: Mapping[str, Any], incoming: Mapping[str, Any]) -> Any:
    return None


def explode(*_: Any) -> Any:
    raise RuntimeError("exploded")


async def awaitable(*_: Any) -> Any:
    await asyncio.sleep(0)


def everything(leaves: Sequence[Leaf]) -> Sequence[Leaf]:
    return leaves


def rank(samples: Sequence[LeafSample], metadata: Mapping[str, Any]) -> None:
    train_once(samples, metadata)
    for number, item in enumerate(samples):
        item.sample.reward = float(number)
        item.sample.metadata["from_agent"] = dict(metadata)
