"""Loss of a critic. Tensor methods only: no torch import."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return max((V - G)², (V_old + clip(V - V_old, ±clip) - G)²) / 2: PPO's value loss with its usual clip.

    The factor 1/2 is verl's.

    Args:
        values: [T], V, with gradient.
        old_values: [T], V_old, the values from which the returns were computed.
        returns: [T], G; see `generalized_advantages`.
        clip: largest change of a value that a step rewards, > 0.

    Returns:
        Loss of each token [T], and bool [T], True where |V - V_old| > clip.
    """
    change = values - old_values
    clipped = old_values + change.clamp(-clip, clip)
    return (values - returns).square().maximum((clipped - returns).square()) / 2, change.abs() > clip
