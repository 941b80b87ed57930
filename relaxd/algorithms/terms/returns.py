"""Rewards and advantages of single tokens. Pure functions of numpy arrays, in float64.

Tokens of others (mask 0), such as observations, have no part in it: recursions and discounts pass over them, as if an
answer consisted of its trained tokens only.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


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
        next_value = next_advantage = 0.0
        for token in reversed(begin + np.flatnonzero(mask[begin:end])):
            delta = token_rewards[token] + gamma * next_value - values[token]
            next_advantage, next_value = delta + gamma * lambda_ * next_advantage, values[token]
            advantages[token], returns[token] = next_advantage, next_advantage + next_value
    return advantages, returns
