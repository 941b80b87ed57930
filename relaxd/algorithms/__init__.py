"""Algorithms, one file each with advantage estimator and loss."""

from relaxd.algorithms.base import Advantages, Algorithm, Filtered, LossInputs, LossOutput, Needs, sample_lengths
from relaxd.algorithms.grpo import GRPO
from relaxd.config import AlgorithmConfig

__all__ = [
    "GRPO",
    "Advantages",
    "Algorithm",
    "Filtered",
    "LossInputs",
    "LossOutput",
    "Needs",
    "create",
    "sample_lengths",
]

ALGORITHMS = {"grpo": GRPO}
"""All algorithms by the `name` in the configuration."""


def create(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm of a configuration's [algorithm] section."""
    return ALGORITHMS[config.name](config)
