"""The interface of algorithms: an advantage estimator and a loss.

This package imports no torch at run time: the advantage service has numpy only, and losses use methods of their
tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from relaxd.board import DropReason
from relaxd.config import AlgorithmConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Advantages:
    """The advantages of one group."""

    values: NDArray[np.float32]
    """float32 [T]: one value per response token, the group's samples one after the other."""


@dataclass(frozen=True)
class Filtered:
    """The group is not trained on."""

    reason: DropReason


@dataclass(frozen=True)
class LossInputs:
    """The predicted tokens of one micro-batch, flat: each field is float32 [T] on one device.

    Without prompt tokens; tokens of the environment have mask 0. Where mask is 0, other fields are ignored, even NaN.
    """

    logprobs: Tensor
    """Log-probs of the tokens under the weights being trained (and the sampling temperature). Carries the gradient."""
    rollout_logprobs: Tensor
    """Log-probs that the engine reported."""
    advantages: Tensor
    """Advantage of each token."""
    mask: Tensor
    """1 where the token is trained on, else 0."""
    weight: Tensor
    """Aggregation weight of each token, from `Algorithm.token_weights`."""
    ref_logprobs: Tensor | None = None
    """Log-probs under the reference model; given iff `Algorithm.needs_reference`."""
    entropy: Tensor | None = None
    """Entropy in nats of the distribution that each token was drawn from, with gradient if
    `Algorithm.needs_entropy`; may also be given for reporting."""


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch. Those of a step's micro-batches add up."""

    loss: Tensor
    """Scalar with gradient: a sum over tokens. The step's loss is the sum of these over all micro-batches of all
    ranks divided by `Algorithm.normalizer`, and so doesn't depend on the division into micro-batches."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars: sums over the tokens whose mask is 1. Divided by the step's count of such tokens they are the
    reported means: "ratio", "clip_fraction", "correction_weight", "correction_fraction", "kl", "entropy"."""


class Algorithm(Protocol):
    """An algorithm, made by `relaxd.algorithms.create` from its section of the configuration."""

    @property
    def config(self) -> AlgorithmConfig:
        """The configuration's [algorithm] section."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns of the board for the loss, besides the tokens."""

    @property
    def needs_reference(self) -> bool:
        """True if `loss` needs `ref_logprobs`."""

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` needs `entropy` with its gradient."""

    def advantages(self, rewards: NDArray[np.float64], lengths: NDArray[np.int32]) -> Advantages | Filtered:
        """Advantages of one group.

        Args:
            rewards: float64 [n], finite, one per sample.
            lengths: int32 [n], response tokens of each sample.

        Raises:
            ValueError: the arrays differ in length, or have values without an advantage.
        """

    def token_weights(self, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """Aggregation weight of each response token of some samples.

        Args:
            mask: uint8 [T], 1 where the token is trained on, the samples one after the other.
            lengths: int32 [n], response tokens of each sample; they add up to T.

        Returns:
            float32 [T], 0 where mask is 0.
        """

    def normalizer(self, trained_tokens: int, samples: int) -> float:
        """Return the divisor of the step's summed loss.

        Args:
            trained_tokens: tokens with mask 1 in the whole step, over all ranks.
            samples: samples in the whole step, over all ranks, those without a trained token included.
        """

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return summed loss and statistics of one micro-batch. A pure function.

        Raises:
            ValueError: an input that the algorithm needs is missing, or shapes differ.
        """


def check_group(rewards: NDArray[np.float64], lengths: NDArray[np.int32]) -> None:
    """Check that advantages can be computed.

    Args:
        rewards: [n].
        lengths: [n].

    Raises:
        ValueError: empty, not parallel, a reward that isn't finite, or a negative length.
    """
    if rewards.ndim != 1 or lengths.ndim != 1 or rewards.shape != lengths.shape:
        raise ValueError(f"rewards {list(rewards.shape)} and lengths {list(lengths.shape)} must be parallel [n]")
    if rewards.size == 0:
        raise ValueError("rewards is empty: a group has at least one sample")
    if not np.isfinite(rewards).all():
        index = int(np.flatnonzero(~np.isfinite(rewards))[0])
        raise ValueError(f"rewards[{index}] is {rewards[index]}: it must be finite")
    if (lengths < 0).any():
        index = int(np.flatnonzero(lengths < 0)[0])
        raise ValueError(f"lengths[{index}] is {lengths[index]}: it must not be negative")


def rewards_equal(rewards: NDArray[np.float64]) -> bool:
    """Return True if all rewards of a group are equal.

    Compares largest and smallest instead of the standard deviation, which rounding makes nonzero for identical
    fractions such as 0.1. Differences within rounding errors (1e-12 of the largest magnitude, as in 0.3 and 0.1 + 0.2)
    count as equal, because normalising would amplify them to noise. Small real differences, such as 0 and 1e-9, do not.

    Args:
        rewards: float64 [n], n >= 1, finite.
    """
    largest, smallest = float(rewards.max()), float(rewards.min())
    return largest - smallest <= 1e-12 * max(abs(largest), abs(smallest))
