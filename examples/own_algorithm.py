"""An algorithm of your own: TOPR, Tapered Off-Policy REINFORCE (arXiv 2503.14286).

Put the file in the folder in which you start the services, and in run.toml:

    [algorithm]
    name = "own_algorithm:TOPR"
    settings = { limit = 1.0, kl_coef = 0.01 }

Corrections, limits, KL and entropy terms and aggregation are the base's, with its settings. Coordinator and advantage
service import this file, too, and have no torch: use the methods of tensors, or import torch in `policy_term`.
"""

import numpy as np
from pydantic import Field

from relaxd.algorithms import PolicyGradient, PolicyTerm, Tokens
from relaxd.config import PolicyGradientConfig


class TOPRConfig(PolicyGradientConfig):
    """The settings, with their checks and defaults."""

    limit: float = Field(default=1.0, gt=0)
    """Largest weight of tokens with a negative advantage."""


class TOPR(PolicyGradient):
    """Learn from good answers as they are, and from bad ones as far as the model still gives them.

    L = -A log π where A > 0, else -sg(min(π / π_engine, limit)) A log π.
    """

    Config = TOPRConfig
    config: TOPRConfig

    def sample_advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return [n] from [n]: the rewards relative to the mean of the group's."""
        return rewards - rewards.mean()

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return each token's loss, the ratio to report, and the tokens that count as clipped, all [T]."""
        ratio = (tokens.logprobs - tokens.rollout_logprobs).detach().exp()
        weight = ratio.clamp(max=self.config.limit).masked_fill(tokens.advantages > 0, 1.0)
        return PolicyTerm(-weight * tokens.advantages * tokens.logprobs, ratio, weight < ratio)
