"""The interface of algorithms: an advantage estimator and a loss.

This package imports no torch at run time: the advantage service has numpy only, and losses use methods of their
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from relaxd.reasons import DropReason

if TYPE_CHECKING:
    from torch import Tensor

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})
OF_CANDIDATES = ("candidates", "teacher_candidate_logprobs")
"""Columns with several values per token: one for each candidate token of distillation."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of one group's tokens; for `WithCritic` their rewards."""

    values: NDArray[np.float32]
    """Advantage (or reward) of each token of the group's sequences, in order; float32 [T]."""


@dataclass(frozen=True)
class Filtered:
    """Returned instead of advantages for a group that is not trained on, with the reason."""

    reason: DropReason


@dataclass(frozen=True)
class Candidates:
    """Settings of distillation's candidates: the vocabulary tokens whose probabilities are compared between student
    and teacher at each position."""

    of: Literal["teacher", "student", "union"]
    """Model whose likeliest tokens are the candidates. "student" means the weights at the step's beginning if the
    teacher is in the trainer, and the engine that generated the token if it is a service."""
    top_k: int
    """Number of candidates that a model names at each position, at least 1; with "union" both models name as many."""

    @property
    def width(self) -> int:
        """Size of the last axis of the columns "candidates" and "teacher_candidate_logprobs"."""
        return 2 * self.top_k if self.of == "union" else self.top_k


@dataclass(frozen=True)
class Needs:
    """The columns of the board that an algorithm reads.

    They determine stages, intake, packing and `LossInputs.columns`. relaxd/board/schema.py describes the columns.
    """

    loss: tuple[str, ...]
    """Columns that `Algorithm.loss` reads, each with a value per token. The trainer computes "ref_logprobs" itself in a
    run without a reference service."""
    advantages: tuple[str, ...] = ()
    """Columns that `Algorithm.advantages` reads besides rewards and lengths. Some exist only in the trainer:
    "old_logprobs", and "ref_logprobs" and "teacher_logprobs" of models in its ranks. A run that needs one of these has
    no advantage stage: the trainer computes the advantages once the step is full."""
    finite: tuple[str, ...] = ()
    """Columns of `loss` that must be finite. Models in the trainer's ranks compute them before a step's updates, so
    that a group with a non-finite value is dropped, and no update is skipped because of it."""
    old_logprobs: bool = False
    """True if `Algorithm.loss` reads `LossInputs.old_logprobs`."""
    whitened: bool = False
    """True if the trainer normalises the advantages over all trained tokens of a step (`Whitening`). Training on a step
    then begins only once it is full."""
    values: bool = False
    """True if a critic is trained. `Algorithm.advantages` then returns token rewards;
    `WithCritic.advantages_and_returns` computes the column "advantages" from them and the critic's values."""
    candidates: Candidates | None = None
    """Content of the columns "candidates" and "teacher_candidate_logprobs", if `loss` names them."""


@dataclass(frozen=True)
class LossInputs:
    """The predicted tokens of one micro-batch, in one dimension: tensors on one device, float32 [T] unless stated
    otherwise.

    Prompt tokens are left out; the environment's tokens have mask 0. Where mask is 0, other fields are ignored, even
    NaN. Sequences are whole, but a context-parallel rank has only some of their tokens.
    """

    logprobs: Tensor
    """Log-probs of the tokens under the weights being trained (and the sampling temperature). Carries the gradient."""
    columns: Mapping[str, Tensor]
    """The board's columns that `Needs.loss` lists, by name. Columns with candidates are [T, k], with int64 ids."""
    mask: Tensor
    """Loss mask: 1 for tokens that are trained on, else 0."""
    weight: Tensor
    """Aggregation weight of each token, from `Algorithm.token_weights`."""
    sequence: Tensor
    """Index, within the micro-batch, of the sequence that each token belongs to; int64 [T]."""
    sequences: int
    """Number of sequences in the micro-batch, some of which may have no token here."""
    entropy: Tensor | None = None
    """Entropy in nats of the distribution that each token was drawn from, with gradient if
    `Algorithm.needs_entropy`; may also be given for reporting."""
    candidate_logprobs: Tensor | None = None
    """Log-probs of the tokens in column "candidates" under the weights being trained, with gradient; 0 in empty slots;
    [T, k]."""
    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Function that sums a tensor over the context-parallel ranks, differentiably; None if this rank has all tokens."""

    @property
    def old_logprobs(self) -> Tensor:
        """Log-probs of the tokens under the weights at the step's beginning, [T], without gradient.

        In a step of one update they come from the forward pass. In a step of several updates the trainer computes them
        before the first. See `Needs.old_logprobs`.
        """
        return self.columns.get("old_logprobs", self.logprobs).detach()

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sum values over the tokens of each sequence, on all ranks.

        Differentiable. All context-parallel ranks call it together and get the same sums, so a loss must use the result
        per token, as `result[inputs.sequence]`, and not add it up over sequences.

        Args:
            values: [T], already 0 where the mask is 0.

        Returns:
            [sequences].
        """
        sums = values.new_zeros(self.sequences).index_add(0, self.sequence, values)
        return sums if self.sum_over_ranks is None else self.sum_over_ranks(sums)


@dataclass(frozen=True)
class LossOutput:
    """The loss of one micro-batch. The losses of a step's micro-batches add up."""

    loss: Tensor
    """Scalar with gradient: a sum over tokens. The step's loss is the sum of these over all micro-batches of all
    ranks divided by `Algorithm.normalizer`, and so doesn't depend on the division into micro-batches."""
    sums: dict[str, Tensor] = field(default_factory=dict)
    """Detached scalars: sums over the tokens whose mask is 1. Divided by the step's number of such tokens they give the
    reported means: "ratio", "clip_fraction", "veto_fraction", "opsm_fraction", "correction_weight",
    "correction_fraction", "kl", "teacher_kl", "entropy", "student_candidate_mass", "teacher_candidate_mass",
    "candidate_overlap"."""


class Algorithm(Protocol):
    """An algorithm, made by `relaxd.algorithms.create` from its section of the configuration."""

    @property
    def needs(self) -> Needs:
        """Columns of the board that the loss and the advantages read."""

    @property
    def needs_entropy(self) -> bool:
        """True if `loss` needs the tokens' entropy, with its gradient."""

    def advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any] = NO_COLUMNS
    ) -> Advantages | Filtered:
        """Return the advantages of one group's tokens, or `Filtered` if the group is not to be trained on.

        Args:
            rewards: float64 [n], finite, one per sample.
            lengths: int32 [n], tokens of each sample: of all its sequences (see `sample_lengths`).
            columns: the columns of `Needs.advantages`, by name.

        Raises:
            ValueError: the arrays differ in length, or have values without an advantage.
        """

    def token_weights(self, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the weight that each token of a group has in the loss.

        A sample's sequences count together, so that a conversation of several sequences weighs no more than an answer.

        Args:
            mask: uint8 [T], 1 where the token is trained on, the samples one after the other.
            lengths: int32 [n], tokens of each sample, of all its sequences; they add up to T.

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
        """Return a micro-batch's summed loss, and its sums for metrics. A pure function.

        Raises:
            ValueError: an input that the algorithm needs is missing, or shapes differ.
        """


@runtime_checkable
class WithFilter(Protocol):
    """An algorithm with a filter that can reject a group before its advantages are known."""

    def filtered(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any] = NO_COLUMNS
    ) -> Filtered | None:
        """Return the reason not to train on a group; None to train on it.

        If the trainer computes advantages, it calls this when a group arrives, before it adds the group to a step. A
        group that only `Algorithm.advantages` filters stays in the step, with advantages of 0.

        Args:
            rewards: as for `Algorithm.advantages`.
            lengths: as for `Algorithm.advantages`.
            columns: the board's columns that the trainer reads, without log-probs that it computes itself.
        """


class WithCritic(Algorithm, Protocol):
    """Algorithm that trains a critic (`Needs.values` is True)."""

    @property
    def value_clip(self) -> float:
        """Clip of the critic's loss: changing a value by more than this in a step doesn't lower the loss; > 0."""

    def advantages_and_returns(self, group: ValuedGroup) -> AdvantagesAndReturns:
        """Return a group's advantages, not yet normalised, and the returns to which the critic is fitted."""


@dataclass(frozen=True)
class ValuedGroup:
    """A group with the critic's values. Arrays per token are [T], with the tokens of the samples in order."""

    token_rewards: NDArray[np.float32]
    """Reward of each token, as `Algorithm.advantages` returned it."""
    values: NDArray[np.float32]
    """Value of each token: what the critic predicts from all tokens before it."""
    mask: NDArray[np.uint8]
    """Loss mask: 1 for tokens that are trained on, else 0."""
    lengths: NDArray[np.int32]
    """Number of tokens of each sample, [n], adding up to T."""


class AdvantagesAndReturns(NamedTuple):
    """Advantage and return of each token of a group; both float32 [T], 0 where the mask is 0."""

    advantages: NDArray[np.float32]
    returns: NDArray[np.float32]


def sample_lengths(
    lengths: NDArray[np.integer], sample_of_sequence: NDArray[np.integer], samples: int
) -> NDArray[np.int32]:
    """Return the number of tokens of each sample: the sum over the sample's sequences.

    Args:
        lengths: [S], tokens of each sequence.
        sample_of_sequence: [S], index of each sequence's sample.
        samples: number of samples, n.

    Returns:
        int32 [n].

    Raises:
        ValueError: a sequence belongs to no sample, or the arrays differ in length.
    """
    if sample_of_sequence.size and not 0 <= sample_of_sequence.min() <= sample_of_sequence.max() < samples:
        raise ValueError(
            f"sample_of_sequence is {sample_of_sequence.tolist()}: each must be the index of one of {samples} samples"
        )
    return np.bincount(sample_of_sequence, weights=lengths, minlength=samples).astype(np.int32)


def check_group(rewards: NDArray[np.float64], lengths: NDArray[np.int32]) -> None:
    """Check a group's rewards and lengths, from which advantages are computed.

    Args:
        rewards: [n].
        lengths: [n].

    Raises:
        ValueError: the arrays are empty or differ in shape, a reward isn't finite, or a length is negative.
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


def check_inputs(inputs: LossInputs, needs: Needs, needs_entropy: bool) -> None:
    """Check that a micro-batch has the inputs that an algorithm's loss needs.

    Raises:
        ValueError: a needed input is missing, or shapes differ.
    """
    for name in needs.loss:
        if name not in inputs.columns:
            raise ValueError(f"{name} is missing: the loss needs this column")
    if needs_entropy and inputs.entropy is None:
        raise ValueError("entropy is missing: algorithm.entropy_coef > 0 needs it")
    own = {name: getattr(inputs, name) for name in ("mask", "weight", "sequence", "entropy")}
    wide = {name: tensor for name, tensor in inputs.columns.items() if name in OF_CANDIDATES}
    for name, tensor in {**own, **inputs.columns}.items():
        if tensor is not None and name not in wide and tensor.shape != inputs.logprobs.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, but logprobs is {list(inputs.logprobs.shape)}")
    if wide and inputs.candidate_logprobs is None:
        raise ValueError("candidate_logprobs is missing: the loss compares candidates")
    for name, tensor in {**wide, "candidate_logprobs": inputs.candidate_logprobs}.items():
        if tensor is not None and (tensor.dim() != 2 or len(tensor) != len(inputs.logprobs)):
            raise ValueError(f"{name} is {list(tensor.shape)}, but it must be [{len(inputs.logprobs)}, candidates]")
