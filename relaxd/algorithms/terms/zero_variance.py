"""When all rewards of a group are equal: it then has no advantages, and is dropped under drop_zero_variance."""

import numpy as np
from numpy.typing import NDArray


def rewards_equal(rewards: NDArray[np.float64]) -> bool:
    """Return True if all rewards of a group are equal.

    Compares largest and smallest instead of the standard deviation, which rounding makes nonzero for identical
    fractions such as 0.1. Differences within rounding errors (1e-12 of the largest magnitude, as in 0.3 and 0.1 + 0.2)
    count as equal, because normalising would amplify them to noise. Small real differences, such as 0 and 1e-9, do not.

    Args:
        rewards: float64 [n], n >= 1, finite.
    """
    largest, smallest = float(rewards.max()), float(rewards.min())
    return largest - smallest <= 1e-12 * max(abs(largest), abs(smallest))
