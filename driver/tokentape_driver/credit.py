"""Rewards and token weights by rollout: siblings count as one, however many there are."""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np

from tokentape_driver.errors import InvalidBatch
from tokentape_driver.siblings import (
    GROUP_DEPTH,
    SIBLINGS_DEPTH,
    RolloutId,
    check_distinct,
    id_of,
    rollouts_in,
)

STD_EPSILON: Final = 1e-6


def normalize_rewards(
    group: Sequence[Any], *, by_std: bool = False, reward_key: str | None = None
) -> list[float]:
    """The rewards of one prompt group, less their mean over the rollouts; nothing is changed in the samples.

    A rollout counts once, however many siblings it has: a list of siblings, or samples that stand alone in
    the group with the same `rollout_id`. Equal rewards give exactly 0.0, and so does a group of one rollout.

    Args:
        group: of one prompt: samples and lists of siblings. A batch is normalised group by group.
        by_std: divides by the rollouts' standard deviation plus 1e-6. It is the sample standard deviation
            (divisor: rollouts - 1), as torch computes it and the trainers built on it.
        reward_key: takes this entry of rewards that are dicts.

    Returns:
        float[samples], in the order in which the samples stand in the group; siblings have the same value.

    Raises:
        InvalidBatch: a reward is missing, not a number or not finite; siblings differ in it; the group is not
            such a list, or its `rollout_id`s are not as `validate_rollout_ids` wants them.
    """
    rewards: list[float] = []
    first: list[str] = []
    rollout_of: list[int] = []
    known: dict[RolloutId, int] = {}
    for rollout in check_distinct(rollouts_in(group, "group", GROUP_DEPTH, SIBLINGS_DEPTH)):
        number = len(rewards) if rollout.id is None else known.setdefault(rollout.id, len(rewards))
        for where, sample in rollout.samples:
            reward = _reward(sample, where, reward_key)
            if number == len(rewards):
                rewards.append(reward)
                first.append(where)
            elif reward != rewards[number]:
                raise InvalidBatch(
                    f"{where} has the reward {reward!r}, its sibling {first[number]} has {rewards[number]!r}",
                    position=where,
                )
            rollout_of.append(number)
    values = np.array(rewards)
    values -= values[0]  # so that equal rewards give exactly 0.0
    values -= values.mean()
    if by_std and len(values) > 1:
        values /= values.std(ddof=1) + STD_EPSILON
    normalized: list[float] = values[rollout_of].tolist()
    return normalized


def rollout_mask_sums(samples: Sequence[Any]) -> list[int]:
    """For each sample, how many tokens its rollout trains: the sum of the loss masks over all its siblings.

    Divide a token's loss by it, and every rollout weighs the same, whatever it was split into. It is 0 if the
    rollout trains nothing, as an aborted one.

    Args:
        samples: a flat list that holds all siblings of each rollout, so of a batch, not of a part of it.
            Siblings are those with the same `rollout_id`; a sample without one is a rollout of its own.

    Returns:
        int[samples].

    Raises:
        InvalidBatch: an item is no sample; a mask has not `response_length` values of 0 or 1 (None stands for
            length 0).
    """
    keys: list[tuple[str, RolloutId]] = []
    sums: dict[tuple[str, RolloutId], int] = {}
    for i, sample in enumerate(samples):
        position = f"samples[{i}]"
        rollout_id = id_of(sample, position)
        key = ("alone", i) if rollout_id is None else ("rollout", rollout_id)
        keys.append(key)
        sums[key] = sums.get(key, 0) + _mask_sum(sample, position)
    return [sums[key] for key in keys]


def _reward(sample: Any, position: str, reward_key: str | None) -> float:
    reward = getattr(sample, "reward", None)
    what = "reward"
    if reward_key is not None and reward is not None:
        if not isinstance(reward, Mapping) or reward_key not in reward:
            raise InvalidBatch(
                f"{position} has no entry {reward_key!r} in its reward {reward!r}", position=position
            )
        reward, what = reward[reward_key], f"reward[{reward_key!r}]"
    if reward is None:
        raise InvalidBatch(f"{position} has no {what}", position=position)
    if not isinstance(reward, Real | np.bool_):
        hint = (
            "; name its entry with reward_key" if isinstance(reward, Mapping) and reward_key is None else ""
        )
        raise InvalidBatch(f"{position} has the {what} {reward!r}, no number{hint}", position=position)
    value = float(reward)
    if not math.isfinite(value):
        raise InvalidBatch(f"{position} has the {what} {value}, which is not finite", position=position)
    return value


def _mask_sum(sample: Any, position: str) -> int:
    mask = np.asarray([] if sample.loss_mask is None else sample.loss_mask)
    if mask.shape != (sample.response_length,):
        raise InvalidBatch(
            f"{position}: loss_mask must have response_length = {sample.response_length} values, "
            f"it has shape {mask.shape}",
            position=position,
        )
    if not np.isin(mask, (0, 1)).all():
        raise InvalidBatch(f"{position}: loss_mask holds other values than 0 and 1", position=position)
    return int(mask.sum())
