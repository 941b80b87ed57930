"""Group Sequence Policy Optimization: arXiv 2507.18071."""

from relaxd.algorithms.loss_terms import MAX_LOG_RATIO, clipped_loss
from relaxd.algorithms.policy_gradient import GroupNormalized, PolicyTerm, Tokens
from relaxd.config.algorithm import GSPOConfig


class GSPO(GroupNormalized):
    """GRPO with the ratio of whole sequences, equations 5 to 7.

    s = exp(mean of log r over the sequence's trained tokens), the geometric mean of their ratios, replaces each token's
    ratio in PPO's clipped objective. Its gradient goes through all tokens of the sequence.
    """

    Config = GSPOConfig
    config: GSPOConfig

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return PPO's clipped objective of each token, computed with the ratio of the token's sequence."""
        # The paper's mean is of unlimited ratios (unlike `tokens.log_ratio`); only its exponential must be finite.
        mean = tokens.sequence_mean(tokens.logprobs - tokens.old_logprobs)
        ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        loss, clipped = clipped_loss(ratio, tokens.advantages, self.config)
        return PolicyTerm(loss, ratio, clipped)
