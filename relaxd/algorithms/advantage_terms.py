"""Terms for computing advantages from the rewards of a group or step: baselines, shaping, returns and whitening. Pure
functions of numpy arrays, in float64.

Returns skip tokens that the model didn't generate (mask 0), such as observations: recursions and discounts treat an
answer as its trained tokens only.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from relaxd.config.algorithm_shared import PolicyGradientConfig
from relaxd.reasons import TRUNCATED

Values = NDArray[np.float64]
LOG_SMALLEST = -460.0
"""Natural logarithm of the smallest discount power used, 1e-200: float64 loses digits only far below it."""


def token_rewards(
    rewards: Values, lengths: NDArray[np.int32], mask: NDArray[np.uint8], kl: Values, kl_coef: float
) -> Values:
    """Return the reward of each token: the KL penalty, and at a sample's last trained token also the sample's reward.

    ρ_t = -kl_coef x kl_t + [t is its sample's last trained token] x R. REINFORCE++, arXiv 2501.03262.

    Args:
        rewards: [n], R of each sample.
        lengths: [n], tokens of each sample, adding up to T.
        mask: [T].
        kl: [T], an estimate of the divergence from the reference at each token; ignored where mask is 0.
        kl_coef: weight of `kl`.

    Returns:
        [T], 0 where mask is 0.

    Raises:
        ValueError: a sample has no trained token to receive its reward.
    """
    trained = mask != 0
    result = np.where(trained, -kl_coef * np.where(trained, kl, 0.0), 0.0)
    begin = 0
    for sample, length in enumerate(lengths.tolist()):
        own = np.flatnonzero(trained[begin : begin + length])
        if own.size == 0:
            raise ValueError(f"sample {sample} has no trained token, to which its reward could go")
        result[begin + own[-1]] += rewards[sample]
        begin += length
    return result


def discounted_returns(
    token_rewards: Values, lengths: NDArray[np.int32], mask: NDArray[np.uint8], gamma: float
) -> Values:
    """Return each token's discounted return: G_t = Σ_{u >= t} gamma^(u - t) ρ_u over its sample's trained tokens.

    Args:
        token_rewards: [T], ρ.
        lengths: [n], adding up to T.
        mask: [T].
        gamma: discount for each trained token.

    Returns:
        [T], 0 where mask is 0.
    """
    no_values = np.zeros_like(token_rewards)
    return generalized_advantages(token_rewards, no_values, lengths, mask, gamma, 1.0)[0]


def generalized_advantages(
    token_rewards: Values,
    values: Values,
    lengths: NDArray[np.int32],
    mask: NDArray[np.uint8],
    gamma: float,
    lambda_: float,
) -> tuple[Values, Values]:
    """Return generalized advantages and returns of tokens: Schulman et al., arXiv 1506.02438, equations 11, 12 and 16.

    δ_t = ρ_t + gamma V_{t+1} - V_t, with V = 0 after a sample's last trained token; A_t = δ_t + gamma lambda A_{t+1};
    the returns, to which the critic is fitted, are A + V.

    Args:
        token_rewards: [T], ρ.
        values: [T], V, the critic's values.
        lengths: [n], tokens of each sample, adding up to T.
        mask: [T].
        gamma: discount for each trained token.
        lambda_: weight of later temporal differences.

    Returns:
        Advantages and returns, both [T] and 0 where mask is 0.
    """
    advantages, returns = np.zeros_like(token_rewards), np.zeros_like(token_rewards)
    ends = np.cumsum(lengths)
    for begin, end in zip(ends - lengths, ends, strict=True):
        own = begin + np.flatnonzero(mask[begin:end])
        following = np.append(values[own[1:]], 0.0)[: own.size]
        deltas = token_rewards[own] + gamma * following - values[own]
        advantages[own] = _discounted_sums(deltas, gamma * lambda_)
        returns[own] = advantages[own] + values[own]
    return advantages, returns


def _discounted_sums(terms: Values, discount: float) -> Values:
    """Return for each t the discounted sum of the terms from t on: Σ_{u >= t} discount^(u - t) x terms_u.

    Works in blocks, short enough that discount^length doesn't underflow; a loop over single tokens takes minutes for a
    large step.
    """
    if discount == 0.0:
        return terms
    block = terms.size if discount == 1.0 else max(1, int(LOG_SMALLEST / np.log(discount)))
    result, after = np.empty_like(terms), 0.0
    for begin in reversed(range(0, terms.size, max(block, 1))):
        own = terms[begin : begin + block]
        powers = discount ** np.arange(own.size)
        sums = np.cumsum((own * powers)[::-1])[::-1]
        result[begin : begin + block] = sums / powers + after * discount ** np.arange(own.size, 0, -1)
        after = result[begin]
    return result


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


def group_relative(
    rewards: NDArray[np.float64], *, normalize_std: bool = False, std_epsilon: float = 1e-6
) -> NDArray[np.float64]:
    """Return each sample's advantage relative to its group. DeepSeekMath, arXiv 2402.03300, section 4.1.2.

    A_i = R_i - mean(R), with normalize_std divided by std(R) + std_epsilon. std uses the divisor n - 1, as in verl and
    slime. In a group of one sample, the advantage is the reward (mean 0, std 1, as in verl). Equal rewards give 0.

    Args:
        rewards: [n].
        normalize_std: divide by the standard deviation.
        std_epsilon: added to the standard deviation.

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
    """Return each sample's advantage over the mean reward of its group's other samples. RLOO, arXiv 2402.14740.

    A_i = R_i - mean of the others' rewards = n / (n - 1) (R_i - mean(R)).

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


def overlong_penalties(lengths: NDArray[np.int32], config: PolicyGradientConfig) -> NDArray[np.float64]:
    """Return the penalty that overlong shaping adds to each sample's reward: DAPO, arXiv 2503.14476, equation 13.

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
    """Return True for each sample that a limit cut off, as the finish reason of its last sequence says.

    Args:
        finish: finish reason of each of the S sequences.
        sample_of_sequence: [S], ascending.
        samples: n.

    Returns:
        [n].
    """
    result = np.zeros(samples, np.bool_)
    for sample, reason in zip(sample_of_sequence.tolist(), finish, strict=True):
        result[sample] = reason in TRUNCATED
    return result


def kl_estimates(
    student_logprobs: NDArray[np.floating], ref_logprobs: NDArray[np.floating], mask: NDArray[np.uint8]
) -> NDArray[np.float64]:
    """Return an unbiased estimate of KL(student || reference) at each token: log(student's / reference's probability).

    This is Schulman's k1. Other estimators have no advantage in a reward, which carries no gradient.

    Args:
        student_logprobs: [T].
        ref_logprobs: [T].
        mask: [T].

    Returns:
        [T], 0 where mask is 0.
    """
    difference = student_logprobs.astype(np.float64) - ref_logprobs.astype(np.float64)
    return np.where(mask != 0, difference, 0.0)


@dataclass(frozen=True)
class Whitening:
    """Mean and standard deviation of a step's advantages, with which they are normalised.

    One rank computes the two numbers and a step file records them; applying them again gives the same bits.
    """

    mean: float
    deviation: float
    """Standard deviation; 0 if an advantage isn't finite. Then no normalised advantage is finite, and no update is
    applied."""

    @classmethod
    def of(cls, advantages: Sequence[NDArray[np.float32]], masks: Sequence[NDArray[np.uint8]]) -> "Whitening":
        """Compute mean and standard deviation of a step's advantages, in float64. The order of groups has no influence.

        The variance is that of the population (divisor: the number of tokens), and at least 1e-8.

        Args:
            advantages: [T] of each group.
            masks: [T] of each group; tokens with mask 0 don't count.
        """

        def total(term: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
            # Group by group: a step may have a hundred million tokens. fsum rounds once, in whatever order.
            sums = [
                float(term(values[mask != 0].astype(np.float64)).sum())
                for values, mask in zip(advantages, masks, strict=True)
            ]
            return math.fsum(sums) if all(map(math.isfinite, sums)) else math.nan

        count = sum(int(np.count_nonzero(mask)) for mask in masks)
        if count == 0:
            return cls(0.0, 1.0)
        mean = total(lambda values: values) / count
        if not math.isfinite(mean):
            return cls(0.0, 0.0)
        variance = total(lambda values: np.square(values - mean)) / count
        return cls(mean, math.sqrt(max(variance, 1e-8)))

    def apply(self, advantages: NDArray[np.float32], mask: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return each token's normalised advantage (A - mean) / deviation, float32 [T]; 0 where mask is 0."""
        normalized = (advantages.astype(np.float64) - self.mean) / (self.deviation or math.nan)
        return np.where(mask != 0, normalized, 0.0).astype(np.float32)
