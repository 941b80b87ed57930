"""Algorithms, one file each: an advantage estimator and a loss. docs/algorithms.md compares them."""

from relaxd.algorithms.base import Advantages, Algorithm, Filtered, LossInputs, LossOutput, Needs, sample_lengths
from relaxd.algorithms.create import ALGORITHMS, create
from relaxd.algorithms.grpo import GRPO
from relaxd.algorithms.policy_gradient import PolicyGradient, PolicyTerm, Tokens
from relaxd.algorithms.ppo import PPO
from relaxd.algorithms.results import AlgorithmError

__all__ = [
    "ALGORITHMS",
    "GRPO",
    "PPO",
    "Advantages",
    "Algorithm",
    "AlgorithmError",
    "Filtered",
    "LossInputs",
    "LossOutput",
    "Needs",
    "PolicyGradient",
    "PolicyTerm",
    "Tokens",
    "create",
    "sample_lengths",
]
