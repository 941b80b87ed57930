"""No reward, for trying the rest of a run."""

from relaxd.rewards.interface import RewardInput


def dummy(sample: RewardInput) -> float:
    """0 for every reply. A run drops groups whose rewards are equal unless its algorithm keeps them."""
    return 0.0
