"""Dr. GRPO, "Understanding R1-Zero-Like Training": arXiv 2503.20783."""

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.advantage_terms import group_relative
from relaxd.algorithms.policy_gradient import Clipped
from relaxd.config.algorithm import DrGRPOConfig


class DrGRPO(Clipped):
    """GRPO without the standard deviation and with a constant divisor, section 3.2.

    A_i = R_i - mean(R). Dividing by the deviation favours prompts that are nearly always or nearly never solved;
    dividing by each answer's length favours short right answers and long wrong ones.
    """

    Config = DrGRPOConfig
    config: DrGRPOConfig

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each sample's advantage, its reward minus the group's mean reward; [n]."""
        return group_relative(rewards)
