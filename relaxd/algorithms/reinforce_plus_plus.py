"""REINFORCE++ and its variant with a baseline: arXiv 2501.03262."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import advantage_terms
from relaxd.algorithms.advantage_terms import group_relative
from relaxd.algorithms.base import Needs
from relaxd.algorithms.policy_gradient import Clipped
from relaxd.config.algorithm import ReinforcePlusPlusBaselineConfig, ReinforcePlusPlusConfig


class ReinforcePlusPlus(Clipped):
    """PPO's clipped objective without a critic.

    ρ_t = [t is the last trained token] R - kl_reward_coef x kl_t, and A_t = Σ_{u >= t} gamma^(u - t) ρ_u, normalised
    over all trained tokens of the step (`Whitening`). Samples aren't compared within a group: a group may be one
    sample.
    """

    Config = ReinforcePlusPlusConfig
    config: ReinforcePlusPlusConfig

    @property
    def needs(self) -> Needs:
        """Columns that the base class reads, and the loss mask for advantages."""
        needs = super().needs
        return replace(needs, advantages=tuple(dict.fromkeys(("loss_mask", *needs.advantages))))

    def token_advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any]
    ) -> NDArray[np.float64]:
        """Return the discounted sum of each token's and all later tokens' rewards, [T], not yet normalised."""
        mask, kl_coef = columns["loss_mask"], self.config.kl_reward_coef
        kl = np.zeros(mask.size)
        if kl_coef > 0:
            kl = advantage_terms.kl_estimates(columns[self._student_column], columns["ref_logprobs"], mask)
        per_token = advantage_terms.token_rewards(rewards, lengths, mask, kl, kl_coef)
        return advantage_terms.discounted_returns(per_token, lengths, mask, self.config.gamma)


class ReinforcePlusPlusBaseline(Clipped):
    """REINFORCE++ with the group's mean reward as baseline.

    A = R - mean(R) for each token, normalised over all trained tokens of the step. The divergence from the reference is
    a term of the loss (kl_coef).
    """

    Config = ReinforcePlusPlusBaselineConfig
    config: ReinforcePlusPlusBaselineConfig

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each sample's advantage, its reward minus the group's mean reward; [n], not yet normalised."""
        return group_relative(rewards)
