"""Algorithms: one file each, its advantage estimator and its loss side by side."""

from relaxd.algorithms.base import Advantages, Algorithm, Filtered, LossInputs, LossOutput
from relaxd.algorithms.grpo import GRPO
from relaxd.config import AlgorithmConfig

__all__ = ["GRPO", "Advantages", "Algorithm", "Filtered", "LossInputs", "LossOutput", "create"]

ALGORITHMS = {"grpo": GRPO}
"""Every algorithm by the `name` of its configuration."""


def create(config: AlgorithmConfig) -> Algorithm:
    """Make the algorithm that a configuration's [algorithm] section describes."""
    return ALGORITHMS[config.name](config)
