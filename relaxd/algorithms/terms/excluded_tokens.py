"""Tokens that are left out of the policy gradient. Tensor methods only: no torch import.

They keep their place in the divisors of the loss, and their KL and entropy terms, except an unbiased KL term, which has
the ratio as a factor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from relaxd.config.policy_gradient import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

    from relaxd.algorithms.base import LossInputs


def has_veto(config: PolicyGradientConfig) -> bool:
    """Return whether any ratio is extreme."""
    return config.veto_high > 0 or config.veto_low > 0


def vetoed(log_ratios: list[Tensor], trained: Tensor, inputs: LossInputs, config: PolicyGradientConfig) -> Tensor:
    """Return the tokens with an extreme ratio: above veto_high or below veto_low. NaN stays, to be found.

    PPO's clip doesn't limit the ratio of a token with a negative advantage from above, so one token whose probability
    rose from 1e-8 to 1e-3 would have 1e5 times the gradient of any other.

    Args:
        log_ratios: logarithms of the ratios to look at, each [T].
        trained: bool [T].
        inputs: the micro-batch, for its sequences.
        config: the limits; with veto_sequences all tokens of a sequence follow.

    Returns:
        bool [T].
    """
    extreme = ~trained
    for log_ratio in log_ratios:
        if config.veto_high > 0:
            extreme = extreme | (log_ratio > math.log(config.veto_high))
        if config.veto_low > 0:
            extreme = extreme | (log_ratio < math.log(config.veto_low))
    extreme = extreme & trained
    if config.veto_sequences:
        extreme = (inputs.segment_sum(extreme.to(inputs.logprobs.dtype)) > 0)[inputs.sequence] & trained
    return extreme


def off_policy_sequences(
    rollout_log_ratio: Tensor, advantages: Tensor, trained: Tensor, inputs: LossInputs, delta: float
) -> Tensor:
    """Return the tokens that off-policy sequence masking leaves out: DeepSeek-V3.2, arXiv 2512.02556, equation 9.

    Those with A < 0 in a sequence whose mean of log(engine's probability / current probability) is above delta: the
    policy has moved away from a bad answer, which can teach it little more.

    Args:
        rollout_log_ratio: [T], log(current / engine's probability), detached, 0 where not trained.
        advantages: [T].
        trained: bool [T].
        inputs: the micro-batch, for its sequences.
        delta: the limit.

    Returns:
        bool [T].
    """
    count = inputs.segment_sum(trained.to(rollout_log_ratio.dtype)).clamp(min=1.0)
    divergence = inputs.segment_sum(-rollout_log_ratio) / count
    return (divergence > delta)[inputs.sequence] & (advantages < 0) & trained
