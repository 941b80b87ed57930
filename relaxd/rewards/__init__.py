"""Rewards: pure functions over a sample or a group. `REWARDS` lists the bundled ones."""

from relaxd.rewards.interface import BadRewardError, Reward, RewardInput, RewardOutput, check_output
from relaxd.rewards.loading import resolve
from relaxd.rewards.table import REWARDS, UnknownRewardError, check_name, describe, is_bundled

__all__ = [
    "REWARDS",
    "BadRewardError",
    "Reward",
    "RewardInput",
    "RewardOutput",
    "UnknownRewardError",
    "check_name",
    "check_output",
    "describe",
    "is_bundled",
    "resolve",
]
