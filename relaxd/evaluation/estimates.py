"""pass@k, and confidence intervals of means over prompts."""

import math
from collections.abc import Sequence

Z95 = 1.959963984540054
"""The normal distribution's quantile for a two-sided interval of 95 %."""


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of pass@k of one prompt: 1 - C(n - right, k) / C(n, k).

    Equation 1 of Chen et al. 2021 (arXiv 2107.03374), as a product, which doesn't overflow.

    Args:
        n: answers to the prompt.
        right: right ones among them.
        k: answers that one would draw, at most n.

    Raises ValueError: k is not 1 to n, or right not 0 to n.
    """
    if not 1 <= k <= n or not 0 <= right <= n:
        raise ValueError(f"k = {k} must be 1 to n = {n}, and right = {right} 0 to n")
    if n - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / place for place in range(n - right + 1, n + 1))


def interval(values: Sequence[float], samples_per_prompt: int = 1) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of values from 0 to 1, one for each prompt.

    It is Wilson's score interval (Wilson 1927) with the effective number of samples, mean x (1 - mean) / variance of
    the mean (Korn and Graubard 1998, without the correction of degrees of freedom): prompts, not answers, are
    independent. With one answer to each prompt it is Wilson's own with a prompt less. Unlike a bootstrap it has a width
    when all values are 0 or all are 1.

    Args:
        values: at least one.
        samples_per_prompt: answers behind each value. The effective number is at most all answers.

    Raises ValueError: there are no values.
    """
    count = len(values)
    if not count:
        raise ValueError("an interval needs at least one value")
    mean = min(max(math.fsum(values) / count, 0.0), 1.0)
    effective = float(count)
    if count > 1 and 0.0 < mean < 1.0:
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count
        most = float(count * samples_per_prompt)
        effective = min(mean * (1 - mean) / variance, most) if variance > 0 else most
    share = Z95**2 / effective
    middle = (mean + share / 2) / (1 + share)
    half = Z95 / (1 + share) * math.sqrt(mean * (1 - mean) / effective + share / (4 * effective))
    return max(0.0, min(middle - half, mean)), min(1.0, max(middle + half, mean))
