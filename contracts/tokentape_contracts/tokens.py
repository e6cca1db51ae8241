"""What a token id and a log-prob can be: one rule for an engine's answers, imported sessions and samples."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentape_contracts import limits


def first_bad_id(ids: NDArray[np.integer[Any]]) -> int | None:
    """The position of the first id below 0; None if there is none.

    Args:
        ids: int[T].
    """
    return int(np.argmax(ids < 0)) if ids.size and ids.min() < 0 else None


def first_bad_log_prob(log_probs: NDArray[np.floating[Any]]) -> int | None:
    """The position of the first log-prob that is not finite or above `LOGPROB_MAX`; None if there is none.

    Args:
        log_probs: float[T].
    """
    with np.errstate(invalid="ignore"):  # a signalling NaN
        # Both comparisons are false for NaN, which every minimum and maximum becomes that meets one.
        if not log_probs.size or (log_probs.max() <= limits.LOGPROB_MAX and log_probs.min() > -np.inf):
            return None
        return int(np.argmin((log_probs <= limits.LOGPROB_MAX) & (log_probs > -np.inf)))
