"""RLOO, REINFORCE Leave-One-Out: "Back to Basics", arXiv 2402.14740."""

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.advantage_terms import leave_one_out
from relaxd.algorithms.policy_gradient import PolicyGradient, PolicyTerm, Tokens
from relaxd.config.algorithm import RLOOConfig


class RLOO(PolicyGradient):
    """REINFORCE with the mean reward of the group's other samples as baseline.

    A_i = R_i - mean of the others' rewards; L = -A log π. A sample's baseline doesn't depend on the sample, so the
    gradient is unbiased if the trained policy generated the samples.
    """

    Config = RLOOConfig
    config: RLOOConfig

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each sample's advantage, its reward minus the mean reward of the group's other samples; [n]."""
        return leave_one_out(rewards)

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return -advantage x log-prob of each token. No token is clipped."""
        return PolicyTerm(-tokens.advantages * tokens.logprobs, tokens.ratio, tokens.ratio != tokens.ratio)
