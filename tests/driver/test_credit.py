"""Rewards and token weights by rollout."""

import re
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from tokentape_driver import InvalidBatch, RolloutSample, normalize_rewards, rollout_mask_sums


def s(reward: Any = 0.0, rollout_id: int | None = None) -> RolloutSample:
    return RolloutSample(reward=reward, rollout_id=rollout_id)


def masked(mask: Any, rollout_id: int | None = None) -> RolloutSample:
    return RolloutSample(
        loss_mask=mask, response_length=0 if mask is None else len(mask), rollout_id=rollout_id
    )


def test_a_rollout_counts_once() -> None:
    """The mean is over rollouts: three siblings with reward 1 beside one sample with 0 give ±0.5."""
    group = [[s(1.0, 1), s(1.0, 1), s(1.0, 1)], s(0.0)]
    assert normalize_rewards(group) == [0.5, 0.5, 0.5, -0.5]


def test_by_std() -> None:
    """`by_std` divides by the sample standard deviation of the rollouts plus 1e-6."""
    group = [s(1), [s(2, 5), s(2, 5)], s(3), s(6)]  # mean 3, squares 4 + 1 + 0 + 9 = 14, 14 / 3
    std = (14 / 3) ** 0.5
    expected = [d / (std + 1e-6) for d in (-2, -1, -1, 0, 3)]
    assert normalize_rewards(group, by_std=True) == pytest.approx(expected, rel=1e-12)
    assert normalize_rewards([s(0), s(1)], by_std=True) == pytest.approx([-0.7071057812, 0.7071057812])


def test_flat_siblings() -> None:
    """Samples that stand alone with one id are siblings too, wherever in the group they are."""
    assert normalize_rewards([s(1, 1), s(0, 2), s(1, 1), s(2)]) == [0, -1, 0, 1]


@pytest.mark.parametrize("by_std", [False, True])
@pytest.mark.parametrize("group", [[s(0.1), s(0.1), s(0.1)], [s(0.7)], [[s(0.3, 1), s(0.3, 1)]]])
def test_nothing_to_learn(group: Any, by_std: bool) -> None:
    """Equal rewards, and one rollout alone, give exactly 0.0."""
    assert set(normalize_rewards(group, by_std=by_std)) == {0.0}


def test_the_samples_are_not_changed() -> None:
    """Normalising changes no reward in the samples."""
    group = [[s(1.0, 1), s(1.0, 1)], s(0.0)]
    before = deepcopy([vars(group[0][0]), vars(group[1])])  # type: ignore[index]
    normalize_rewards(group, by_std=True)
    assert [vars(group[0][0]), vars(group[1])] == before  # type: ignore[index]


def test_rewards_that_are_dicts() -> None:
    """`reward_key` takes one entry of rewards that are dicts; numpy's numbers and booleans count."""
    assert normalize_rewards([s({"a": 1, "b": 9}), s({"a": 3})], reward_key="a") == [-1, 1]
    assert normalize_rewards([s(True), s(np.bool_(False)), s(np.float32(0.5))]) == [0.5, -0.5, 0]


@pytest.mark.parametrize(
    ("group", "options", "position", "text"),
    [
        ([s(1), s(None)], {}, "group[1]", "has no reward"),
        ([s(1), [s(1, 2), s(float("nan"), 2)]], {}, "group[1][1]", "nan, which is not finite"),
        ([s(float("-inf"))], {}, "group[0]", "not finite"),
        ([s("1")], {}, "group[0]", "no number"),
        ([s({"a": 1})], {}, "group[0]", "name its entry with reward_key"),
        ([s({"a": 1})], {"reward_key": "b"}, "group[0]", "no entry 'b'"),
        ([s(1.0)], {"reward_key": "b"}, "group[0]", "no entry 'b'"),
        ([s({"a": None})], {"reward_key": "a"}, "group[0]", "has no reward['a']"),
        ([s(0), [s(1.0, 2), s(0.5, 2)]], {}, "group[1][1]", "0.5, its sibling group[1][0] has 1.0"),
        ([s(1.0, 2), s(3), s(0.5, 2)], {}, "group[2]", "0.5, its sibling group[0] has 1.0"),
        ([[s(1), s(1)]], {}, "group[0][0]", "has no rollout_id"),
        ([[s(1, 3)], [s(1, 3)]], {}, "group[1]", "rollout_id 3 of another rollout, group[0]"),
        ([[[s(1)], [s(1)]]], {}, "group[0][0]", "a list where a sample must be"),
        ([], {}, "group", "an empty list"),
        ([s(1), None], {}, "group[1]", "no sample"),
    ],
)
def test_refused(group: Any, options: Any, position: str, text: str) -> None:
    """Missing, non-finite and unequal rewards, and what is no group, are refused with their position."""
    with pytest.raises(InvalidBatch, match=re.escape(text)) as caught:
        normalize_rewards(group, **options)
    assert caught.value.position == position


def test_mask_sums() -> None:
    """Each sample gets the trained tokens of its whole rollout; a sample without an id is one of its own."""
    samples = [
        masked([1, 0, 1], 0),
        masked([1, 1, 1]),
        masked([0, 0, 1], 0),
        masked(np.array([1], np.uint8), 1),
        masked(None),
        masked([1]),
        masked(np.ones(300, np.uint8), 2),
    ]
    assert rollout_mask_sums(samples) == [3, 3, 3, 1, 0, 1, 300]
    assert rollout_mask_sums([]) == []


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (RolloutSample(loss_mask=[1], response_length=2), "response_length = 2 values"),
        (RolloutSample(loss_mask=None, response_length=2), "response_length = 2 values"),
        (RolloutSample(loss_mask=[2], response_length=1), "other values than 0 and 1"),
        ([masked([1], 1)], "type list, no sample"),
    ],
)
def test_masks_that_do_not_fit(sample: Any, text: str) -> None:
    """A mask of another length or with other values, and a list, are refused with the position."""
    with pytest.raises(InvalidBatch, match=re.escape(text)) as caught:
        rollout_mask_sums([masked([1]), sample])
    assert caught.value.position == "samples[1]"
