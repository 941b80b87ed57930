"""CISPO, Clipped IS-weight Policy Optimization: MiniMax-M1, arXiv 2506.13585."""

from relaxd.algorithms.policy_gradient import GroupNormalized, PolicyTerm, Tokens
from relaxd.config.algorithm import CISPOConfig


class CISPO(GroupNormalized):
    """REINFORCE with a clipped importance weight, equations 4 and 5.

    L = -sg(clip(r, 1 - clip_low, 1 + clip_high)) A log π, sg: without gradient. PPO's clip removes the gradient of
    fast-changing tokens, such as rare words at which an argument turns; here every token keeps its gradient.
    """

    Config = CISPOConfig
    config: CISPOConfig

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return -weight x advantage x log-prob of each token; tokens whose weight is limited count as clipped."""
        ratio = tokens.ratio.detach()
        weight = ratio.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high)
        return PolicyTerm(-weight * tokens.advantages * tokens.logprobs, ratio, weight != ratio)
