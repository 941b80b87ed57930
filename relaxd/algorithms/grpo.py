"""Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300."""

from relaxd.algorithms.policy_gradient import Clipped, GroupNormalized
from relaxd.config.algorithm import GRPOConfig


class GRPO(GroupNormalized, Clipped):
    """GRPO, equation 3: advantages relative to the group, PPO's clipped objective, a KL term.

    A_i = (R_i - mean(R)) / (std(R) + std_epsilon) for each token of sample i; L = max(-r A, -clip(r) A).
    """

    Config = GRPOConfig
    config: GRPOConfig
