"""Baselines, with which a sample's reward is compared. Pure functions of one group's rewards."""

import numpy as np
from numpy.typing import NDArray


def group_relative(
    rewards: NDArray[np.float64], *, normalize_std: bool = False, std_epsilon: float = 1e-6
) -> NDArray[np.float64]:
    """A_i = R_i - mean(R), divided by std(R) + std_epsilon if asked. DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    std uses the divisor n - 1, as in verl and slime. The advantage of a group of one sample is its reward (mean 0,
    std 1, as in verl). Equal rewards give 0.

    Args:
        rewards: [n].
        normalize_std: divide by the standard deviation.
        std_epsilon: added to it.

    Returns:
        [n].
    """
    if rewards.size == 1:
        return rewards
    if rewards_equal(rewards):
        return np.zeros_like(rewards)
    advantages = rewards - rewards.mean()
    return advantages / (rewards.std(ddof=1) + std_epsilon) if normalize_std else advantages


def leave_one_out(rewards: NDArray[np.float64]) -> NDArray[np.float64]:
    """A_i = R_i - mean of the others' rewards = n / (n - 1) (R_i - mean(R)). RLOO, arXiv 2402.14740.

    Args:
        rewards: [n], n >= 2.

    Returns:
        [n].

    Raises:
        ValueError: there is only one sample.
    """
    n = rewards.size
    if n < 2:
        raise ValueError(f"the group has {n} sample: the baseline is the mean of the others, so there must be two")
    return np.zeros_like(rewards) if rewards_equal(rewards) else n / (n - 1) * (rewards - rewards.mean())


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
