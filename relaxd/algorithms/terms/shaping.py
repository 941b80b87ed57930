"""Changes of a group's rewards before they become advantages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from relaxd.config.policy_gradient import PolicyGradientConfig


def overlong_penalties(lengths: NDArray[np.int32], config: PolicyGradientConfig) -> NDArray[np.float64]:
    """Return the term of overlong shaping in each sample's reward: DAPO, arXiv 2503.14476, equation 13.

    0 up to overlong_limit - overlong_buffer tokens, -overlong_penalty from overlong_limit on, linear in between.

    Args:
        lengths: [n], tokens of each sample.
        config: the limits.

    Returns:
        [n], <= 0.
    """
    if config.overlong_buffer == 0:
        return np.zeros(lengths.size)
    beyond = (lengths - (config.overlong_limit - config.overlong_buffer)) / config.overlong_buffer
    # + 0.0 turns -0.0 into 0.0.
    return -config.overlong_penalty * np.clip(beyond, 0.0, 1.0) + 0.0


def truncated_samples(
    finish: Sequence[str], sample_of_sequence: NDArray[np.integer], samples: int
) -> NDArray[np.bool_]:
    """Return which samples were cut at their maximum length: those whose last sequence was.

    Args:
        finish: why each sequence ended, S of them.
        sample_of_sequence: [S], ascending.
        samples: n.

    Returns:
        [n].
    """
    result = np.zeros(samples, np.bool_)
    for sample, reason in zip(sample_of_sequence.tolist(), finish, strict=True):
        result[sample] = reason == "length"
    return result


def kl_estimates(
    student_logprobs: NDArray[np.floating], ref_logprobs: NDArray[np.floating], mask: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """Return an unbiased estimate of KL(student || reference) at each token: log(student's / reference's probability).

    It is Schulman's k1. In a reward, which carries no gradient, nothing speaks for another estimator.

    Args:
        student_logprobs: [T].
        ref_logprobs: [T].
        mask: [T].

    Returns:
        [T], 0 where mask is 0.
    """
    difference = student_logprobs.astype(np.float64) - ref_logprobs.astype(np.float64)
    return np.where(mask != 0, difference, 0.0)
