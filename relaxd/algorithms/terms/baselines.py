"""Baselines, with which a sample's reward is compared. Pure functions of one group's rewards."""

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.terms.zero_variance import rewards_equal


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
