"""Soft Adaptive Policy Optimization: arXiv 2511.20347."""

from relaxd.algorithms.policy_gradient import GroupNormalized, PolicyTerm, Tokens
from relaxd.config.algorithm import SAPOConfig


class SAPO(GroupNormalized):
    """GRPO with a smooth gate instead of a clip.

    L = -(4 / τ) σ(τ (r - 1)) A, with τ = tau_positive where A > 0, else tau_negative. The gradient is PPO's times
    4 p (1 - p), p = σ(τ (r - 1)), which is 1 at r = 1 and decreases on both sides. The loss at r = 1 is -2 A / τ, so
    its value isn't comparable with other algorithms'.
    """

    Config = SAPOConfig
    config: SAPOConfig

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return each token's gated objective. A token counts as clipped if the gate's gradient factor is below 0.9."""
        config, ratio = self.config, tokens.ratio
        positive = tokens.advantages > 0
        tau = ratio.new_full(ratio.shape, config.tau_negative).masked_fill(positive, config.tau_positive)
        gate = (tau * (ratio - 1.0)).sigmoid()
        return PolicyTerm(-4.0 / tau * gate * tokens.advantages, ratio, 4.0 * gate * (1.0 - gate) < 0.9)
