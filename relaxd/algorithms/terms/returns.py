"""Rewards and advantages of single tokens. Pure functions of numpy arrays, in float64.

Tokens of others (mask 0), such as observations, have no part in it: recursions and discounts pass over them, as if an
answer consisted of its trained tokens only.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
LOG_SMALLEST = -460.0
"""Logarithm of the smallest power of a discount: 1e-200, far from where float64 loses digits."""


def token_rewards(
    rewards: Values, lengths: NDArray[np.int32], mask: NDArray[np.uint8], kl: Values, kl_coef: float
) -> Values:
    """ρ_t = -kl_coef x kl_t + [t is its sample's last trained token] x R. REINFORCE++, arXiv 2501.03262.

    Args:
        rewards: [n].
        lengths: [n], tokens of each sample, adding up to T.
        mask: [T].
        kl: [T], an estimate of the divergence from the reference at each token; ignored where mask is 0.
        kl_coef: weight of it.

    Returns:
        [T], 0 where mask is 0.

    Raises:
        ValueError: a sample has no trained token to which its reward could go.
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
    """G_t = Σ_{u >= t} gamma^(u - t) ρ_u over the trained tokens of each sample.

    Args:
        token_rewards: [T].
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
    """Generalized advantage estimation: Schulman et al., arXiv 1506.02438, equations 11, 12 and 16.

    δ_t = ρ_t + gamma V_{t+1} - V_t, with V = 0 after a sample's last trained token; A_t = δ_t + gamma lambda A_{t+1};
    the returns, to which the critic is fitted, are A + V.

    Args:
        token_rewards: [T], ρ.
        values: [T], V, the critic's.
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
    """Return Σ_{u >= t} discount^(u - t) x terms_u for each t.

    In blocks so long that discount^length doesn't underflow: a loop over the tokens of a large step takes minutes.
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
