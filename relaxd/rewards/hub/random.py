"""A reward by chance, as a baseline: what a run learns with it, it learns from something else."""

import random as chance

from relaxd.rewards.interface import RewardInput


def random(sample: RewardInput) -> float:
    """0 or 1, by chance, whatever the reply."""
    return float(chance.getrandbits(1))
