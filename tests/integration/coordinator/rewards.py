"""A reward that never works."""

from relaxd.rewards import RewardInput


def broken(sample: RewardInput) -> float:
    raise ValueError("told to fail")
