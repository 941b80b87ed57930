"""A random reward, as a baseline: progress with it doesn't come from the reward."""

import random as chance

from relaxd.rewards.interface import RewardInput


def random(sample: RewardInput) -> float:
    """0 or 1 at random for any reply."""
    return float(chance.getrandbits(1))
