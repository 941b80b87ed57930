"""Off-policy corrections: an importance weight for each token.

The engine's probabilities differ from the trainer's even under the same weights (kernels, precision, choice of
experts), and in an asynchronous run the engine had older weights. Both make the policy gradient off-policy. With

    w = pi_train,old(y_t) / pi_rollout(y_t)

as weight of its terms it is unbiased again, token by token, but w can be huge. Therefore it is limited.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxd.config.policy_gradient import PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, so that ratios are finite."""


def correction_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, config: PolicyGradientConfig
) -> tuple[Tensor, Tensor]:
    """Return the weight of each token's policy-gradient term, and where it was limited; with w as above:

    - none: 1.
    - tis: clip(w, tis_clip_low, tis_clip). Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training"; the truncation is that of Ionides 2008. The lower limit, 0 by
      default, is slime's.
    - icepop: w if icepop_low <= w <= icepop_high, else 0: such tokens are left out. "Every Step Evolves", arXiv
      2510.18855, section on IcePop.

    Both are detached: no gradient goes through the weights.

    Args:
        train_logprobs: [T], the trainer's log-probs under the weights at the start of the step.
        rollout_logprobs: [T], the engine's log-probs.
        config: the correction and its limits.

    Returns:
        Weights [T] >= 0, and [T] 1 where w was limited or the token left out, else 0.
    """
    ratio = (train_logprobs.detach() - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match config.correction:
        case "none":
            return ratio.new_ones(ratio.shape), ratio.new_zeros(ratio.shape)
        case "tis":
            limited = (ratio < config.tis_clip_low) | (ratio > config.tis_clip)
            return ratio.clamp(config.tis_clip_low, config.tis_clip), limited.to(ratio.dtype)
        case "icepop":
            limited = (ratio < config.icepop_low) | (ratio > config.icepop_high)
            return ratio.masked_fill(limited, 0.0), limited.to(ratio.dtype)
