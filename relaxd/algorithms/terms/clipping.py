"""PPO's clipped objective. Tensor methods only: no torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaxd.config.policy_gradient import ClippedConfig

if TYPE_CHECKING:
    from torch import Tensor


def clipped_loss(ratio: Tensor, advantages: Tensor, config: ClippedConfig) -> tuple[Tensor, Tensor]:
    """Return max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A): PPO, arXiv 1707.06347, equation 7.

    With dual_clip c, and where A < 0, it is at most -c A: Dual-Clip PPO, arXiv 1912.09729.

    Args:
        ratio: [T], r, with gradient.
        advantages: [T], A.
        config: the limits.

    Returns:
        Loss of each token [T], and bool [T], True where the clipped term is larger, so that a token has no gradient.
        Tokens that only dual_clip cuts aren't counted, as in verl.
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss = unclipped.maximum(clipped)
    if config.dual_clip > 0:
        loss = loss.minimum(-config.dual_clip * advantages).where(advantages < 0, loss)
    return loss, clipped > unclipped
