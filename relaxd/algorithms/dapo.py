"""DAPO, Decoupled Clip and Dynamic Sampling Policy Optimization: arXiv 2503.14476."""

from relaxd.algorithms.policy_gradient import Clipped, GroupNormalized
from relaxd.config.algorithm import DAPOConfig


class DAPO(GroupNormalized, Clipped):
    """GRPO with four changes, equation 8: clip_high > clip_low, dynamic sampling, token mean, overlong shaping.

    All algorithms have settings for the last two (`aggregation`, `shaping`); dynamic sampling is drop_zero_variance.
    The paper has no KL term.
    """

    Config = DAPOConfig
    config: DAPOConfig
