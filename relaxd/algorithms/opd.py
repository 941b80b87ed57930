"""OPD, on-policy distillation: arXiv 2306.13649."""

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.policy_gradient import Clipped, GroupNormalized
from relaxd.config.algorithm import OPDConfig


class OPD(GroupNormalized, Clipped):
    """On-policy distillation: the student generates, the teacher scores every token. Rewards count with reward_coef.

    A_t = reward_coef x (R_i - mean(R)) / (std(R) + std_epsilon) - distill_coef x (log π_student - log π_teacher) of
    token t, with PPO's clipped objective; or, with distill_loss_coef, the divergence as a term of the loss. The base
    class has both, so any other algorithm can have a teacher, too.
    """

    Config = OPDConfig
    config: OPDConfig

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return GRPO's advantages times reward_coef, [n]."""
        return self.config.reward_coef * super().sample_advantages(rewards)
