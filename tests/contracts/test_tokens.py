"""What a token id and a log-prob can be."""

import numpy as np
import pytest

from tokentape_contracts import limits
from tokentape_contracts.tokens import first_bad_id, first_bad_log_prob


@pytest.mark.parametrize(
    ("ids", "position"),
    [([], None), ([0], None), ([5, 2**31 - 1], None), ([0, -1], 1), ([-5, 3, -9], 0)],
    ids=repr,
)
def test_ids(ids: list[int], position: int | None) -> None:
    """The first id below 0 is found, which need not be the lowest; without ids there is none."""
    assert first_bad_id(np.array(ids, np.int32)) == position


@pytest.mark.parametrize(
    ("log_probs", "position"),
    [
        ([], None),
        ([-0.5, 0.0, -0.0, -1e308], None),
        ([limits.LOGPROB_MAX], None),
        ([-0.5, np.nextafter(limits.LOGPROB_MAX, 1)], 1),
        ([-0.5, np.nan, 3.0], 1),
        ([-0.5, -0.5, np.inf], 2),
        ([-np.inf, np.nan], 0),
    ],
    ids=repr,
)
def test_log_probs(log_probs: list[float], position: int | None) -> None:
    """The first log-prob that is not finite or above the limit is found; the limit itself is none."""
    assert first_bad_log_prob(np.array(log_probs)) == position
