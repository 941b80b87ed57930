"""Proximal Policy Optimization with a critic: arXiv 1707.06347, advantages of arXiv 1506.02438."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import advantage_terms
from relaxd.algorithms.base import AdvantagesAndReturns, Needs, ValuedGroup
from relaxd.algorithms.policy_gradient import Clipped
from relaxd.config.algorithm import PPOConfig


class PPO(Clipped):
    """PPO's clipped objective, with the critic's value as baseline of each token.

    ρ_t = [t is the last trained token] R - kl_reward_coef x kl_t; advantages and returns of ρ and the critic's values
    are those of `generalized_advantages`. Samples aren't compared within a group: a group may be one sample.
    """

    Config = PPOConfig
    config: PPOConfig

    @property
    def needs(self) -> Needs:
        """Needs of the base class, and the loss mask, a critic and, with whiten_advantages, normalised advantages."""
        needs = super().needs
        return replace(
            needs,
            advantages=tuple(dict.fromkeys(("loss_mask", *needs.advantages))),
            whitened=needs.whitened or self.config.whiten_advantages,
            values=True,
        )

    @property
    def value_clip(self) -> float:
        return self.config.value_clip

    def token_advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any]
    ) -> NDArray[np.float64]:
        """Return ρ, the reward of each token, [T]: with the critic's values it later gives the advantages.

        Raises:
            ValueError: a sample has no trained token to receive its reward.
        """
        mask, kl_coef = columns["loss_mask"], self.config.kl_reward_coef
        kl = np.zeros(mask.size)
        if kl_coef > 0:
            kl = advantage_terms.kl_estimates(columns[self._student_column], columns["ref_logprobs"], mask)
        return advantage_terms.token_rewards(rewards, lengths, mask, kl, kl_coef)

    def advantages_and_returns(self, group: ValuedGroup) -> AdvantagesAndReturns:
        """Return the generalized advantage and the return of each of a group's tokens."""
        rewards, values = group.token_rewards.astype(np.float64), group.values.astype(np.float64)
        gamma, lambda_ = self.config.gamma, self.config.gae_lambda
        advantages, goals = advantage_terms.generalized_advantages(
            rewards, values, group.lengths, group.mask, gamma, lambda_
        )
        return AdvantagesAndReturns(advantages.astype(np.float32), goals.astype(np.float32))
