"""Corrections for tokens that another policy wrote than the one that is trained: an importance weight for each token.

The engine's probabilities are not quite the trainer's, even under the same weights (other kernels, other precision,
other experts), and in an asynchronous run the engine had older weights. Both make the policy gradient off-policy; with

    w = pi_train,old(y_t) / pi_rollout(y_t)

as a weight of its terms it is unbiased again, token by token, but w may be huge. Hence its limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxd.config import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ± this before exp, so that no ratio is infinite."""


def correction_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The weight of each token's policy-gradient term, and where it was limited; with w as above:

    - none: 1.
    - tis: min(w, tis_clip). Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework secretly
      brings you off-policy RL training"; the truncation is that of Ionides 2008.
    - icepop: w where icepop_low <= w <= icepop_high, else 0: such tokens are left out. "Every Step Evolves", arXiv
      2510.18855, section on IcePop.

    Both are detached: no gradient goes through the weights.

    Args:
        train_logprobs: [T], the trainer's log-probs under the weights at the step's beginning.
        rollout_logprobs: [T], those that the engine reported.
        config: which correction, and its limits.

    Returns:
        Weights [T] >= 0, and [T] 1 where w was truncated or the token left out, else 0.
    """
    ratio = (train_logprobs.detach() - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match config.correction:
        case "none":
            return ratio.new_ones(ratio.shape), ratio.new_zeros(ratio.shape)
        case "tis":
            limited = ratio > config.tis_clip
            return ratio.clamp(max=config.tis_clip), limited.to(ratio.dtype)
        case "icepop":
            limited = (ratio < config.icepop_low) | (ratio > config.icepop_high)
            return ratio.masked_fill(limited, 0.0), limited.to(ratio.dtype)
