"""`validate_rollout_ids`: what a trainer gets says which samples are siblings."""

import re
from typing import Any

import numpy as np
import pytest

from tests.driver.fake import TrainerSample
from tokentape_driver import InvalidBatch, RolloutSample, validate_rollout_ids


def s(rollout_id: Any = None) -> RolloutSample:
    return RolloutSample(rollout_id=rollout_id)


@pytest.mark.parametrize(
    "output",
    [
        [s(), s(), s()],
        [[s(), s()], [s()]],
        [[s(), [s(1), s(1)]], [[s(2)], [s()], s(3)]],
        [[[s()], [s()]]],
        [[s(4), s(4)]],
        ((s(), (s(0), s(0))),),
        [[[s("a"), s("a")], [s("b"), s("b")]]],
        [[[s(1), s(np.int64(1))]]],
        [[[[s(1), s(1)], [s(2), s(2)]]]],
        [[TrainerSample(), [TrainerSample()]]],
    ],
)
def test_what_is_fine(output: Any) -> None:
    """Lists of siblings share an id; samples that stand alone, also as a list of one, need none."""
    validate_rollout_ids(output)


@pytest.mark.parametrize(
    ("output", "position", "text"),
    [
        ([[s()], [s()], [s()], [s(), [s(), s()]]], "output[3][1][0]", "has no rollout_id"),
        ([[[s(1), s()]]], "output[0][0][1]", "has no rollout_id"),
        ([[s(), [s(1), s(1), s(2)]]], "output[0][1][2]", "rollout_id 2, its sibling output[0][1][0] has 1"),
        ([[[[s(1), s(2)]]]], "output[0][0][0][1]", "rollout_id 2"),
        ([[[TrainerSample(), TrainerSample()]]], "output[0][0][0]", "has no rollout_id"),
        ([[[s(1.5), s(1.5)]]], "output[0][0][0]", "must be an integer or a string"),
        ([[[s(True), s(True)]]], "output[0][0][0]", "must be an integer or a string"),
    ],
)
def test_siblings_without_one_id(output: Any, position: str, text: str) -> None:
    """A list of several samples below a group needs one id that is not None; the error names the position."""
    with pytest.raises(InvalidBatch, match=re.escape(text)) as caught:
        validate_rollout_ids(output)
    assert caught.value.position == position
    assert str(caught.value).startswith(position)


@pytest.mark.parametrize(
    ("output", "position"),
    [
        ([[[s(7), s(7)], [s(7), s(7)]]], "output[0][1]"),
        ([[[s(7)]], [[s(7)]]], "output[1][0]"),
        ([[s(7), [s(7), s(7)]]], "output[0][0]"),
    ],
)
def test_two_rollouts_with_one_id(output: Any, position: str) -> None:
    """The id of a list of siblings is no other rollout's: flattened, the two would be one."""
    with pytest.raises(InvalidBatch, match="rollout_id 7 of another rollout, output") as caught:
        validate_rollout_ids(output)
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("output", "position", "text"),
    [
        ([], "output", "an empty list"),
        ([[s()], []], "output[1]", "an empty list"),
        ([[s(), []]], "output[0][1]", "an empty list"),
        ([s(), [s()]], "output", "mixes samples and lists (output[1])"),
        ([[[s(), [s()]]]], "output[0][0]", "mixes samples and lists (output[0][0][1])"),
        ([[s(), None]], "output[0][1]", "type NoneType, no sample"),
        ([["text"]], "output[0][0]", "type str, no sample"),
        ([[[{}]]], "output[0][0][0]", "type dict, no sample"),
        ({"a": [s()]}, "output", "type dict, not a list"),
        (s(), "output", "type RolloutSample, not a list"),
        (None, "output", "type NoneType, not a list"),
    ],
)
def test_wrong_nesting(output: Any, position: str, text: str) -> None:
    """Empty lists, mixtures and what is no sample are refused with their position."""
    with pytest.raises(InvalidBatch, match=re.escape(text)) as caught:
        validate_rollout_ids(output)
    assert caught.value.position == position
