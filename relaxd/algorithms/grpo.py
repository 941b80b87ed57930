"""Group Relative Policy Optimization: DeepSeekMath, arXiv 2402.03300.

Its switches give DAPO's asymmetric clipping, dynamic sampling and token mean (arXiv 2503.14476), and Dr. GRPO's
advantage and constant divisor (arXiv 2503.20783).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms.base import (
    NO_COLUMNS,
    Advantages,
    Filtered,
    LossInputs,
    LossOutput,
    Needs,
    check_group,
    rewards_equal,
)
from relaxd.algorithms.correction import MAX_LOG_RATIO, correction_weights
from relaxd.algorithms.kl import kl_divergence
from relaxd.config import GRPOConfig
from relaxd.drop_reasons import DropReason

if TYPE_CHECKING:
    from torch import Tensor


class GRPO:
    """GRPO: advantages relative to the group's mean reward, PPO's clipped objective, optional KL and entropy terms."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config

    @property
    def needs(self) -> Needs:
        """Columns of the board for the loss: "ref_logprobs" if the KL term is on."""
        reference = ("ref_logprobs",) if self.config.needs_reference else ()
        return Needs(
            loss=("rollout_logprobs", "advantages", *reference), old_logprobs=self.config.old_logprobs == "current"
        )

    @property
    def needs_entropy(self) -> bool:
        """True if the entropy bonus is on."""
        return self.config.entropy_coef > 0

    def advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any] = NO_COLUMNS
    ) -> Advantages | Filtered:
        """A_i = (R_i - mean(R)) / (std(R) + std_epsilon), the same for each token of sample i.

        std uses the divisor n - 1, as in verl and slime. The advantage of a group of one sample is its reward (mean 0,
        std 1, as in verl), and such a group is never dropped for zero variance.

        Args:
            rewards: float64 [n], finite.
            lengths: int32 [n].
            columns: unused.

        Raises:
            ValueError: see `check_group`; or advantages overflow float32.
        """
        check_group(rewards, lengths)
        rewards = rewards.astype(np.float64)
        if rewards.size == 1:
            per_sample = rewards
        elif rewards_equal(rewards):
            if self.config.drop_zero_variance:
                return Filtered(DropReason.ZERO_VARIANCE)
            per_sample = np.zeros_like(rewards)
        else:
            per_sample = rewards - rewards.mean()
            if self.config.normalize_std:
                per_sample = per_sample / (rewards.std(ddof=1) + self.config.std_epsilon)
        if not (np.abs(per_sample) <= np.finfo(np.float32).max).all():
            raise ValueError(f"rewards up to {np.abs(rewards).max():g} are too large: advantages overflow float32")
        return Advantages(np.repeat(per_sample, lengths).astype(np.float32))

    def token_weights(self, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        """sample_mean: 1 / trained tokens of the token's sample. token_mean, constant_length: 1. 0 where mask is 0.

        Args:
            mask: uint8 [T].
            lengths: int32 [n], adding up to T.

        Raises:
            ValueError: lengths don't add up to T.
        """
        if int(lengths.sum()) != mask.size:
            raise ValueError(f"lengths add up to {int(lengths.sum())}, but mask has {mask.size} tokens")
        trained = (mask != 0).astype(np.float32)
        if self.config.loss_aggregation != "sample_mean":
            return trained
        sample_of_token = np.repeat(np.arange(lengths.size), lengths)
        trained_per_sample = np.bincount(sample_of_token, weights=trained, minlength=lengths.size)
        return (trained / np.maximum(trained_per_sample, 1)[sample_of_token]).astype(np.float32)

    def normalizer(self, trained_tokens: int, samples: int) -> float:
        """sample_mean: samples. token_mean: trained_tokens. constant_length: samples x constant_length. At least 1.

        Args:
            trained_tokens: tokens with mask 1 in the whole step.
            samples: samples in the whole step.
        """
        match self.config.loss_aggregation:
            case "sample_mean":
                divisor = samples
            case "token_mean":
                divisor = trained_tokens
            case "constant_length":
                divisor = samples * self.config.constant_length
        return float(max(divisor, 1))

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Sum over trained tokens of weight x (w x clipped objective + kl_coef x KL - entropy_coef x entropy).

        The objective is PPO's max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), r the probability ratio to the old
        policy: the engine's, or the trainer's at the start of the step (old_logprobs = "current"). In a step of one
        update the latter is what the forward pass computes: r is 1, and its gradient is that of the log-prob. log r
        is clamped to ± MAX_LOG_RATIO, so that a very unlikely token gives a finite loss and, like any clipped token, no
        gradient. w is `correction_weights`, 1 without a correction.

        clip_fraction counts the tokens whose clipped term is larger, which have no policy gradient;
        correction_fraction those whose w was truncated or that were left out.

        Args:
            inputs: the micro-batch's tokens.

        Raises:
            ValueError: a column or entropy is needed and missing, or shapes differ.
        """
        _check(inputs, self.needs, self.needs_entropy)
        columns = inputs.columns
        trained = inputs.mask != 0
        # Masked before exp, because 0 x inf and its gradient are NaN.
        logprobs = inputs.logprobs.masked_fill(~trained, 0.0)
        old = inputs.old_logprobs if self.config.old_logprobs == "current" else columns["rollout_logprobs"]
        log_ratio = (logprobs - old.masked_fill(~trained, 0.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        advantages = columns["advantages"].masked_fill(~trained, 0.0)
        unclipped = -ratio * advantages
        clipped = -ratio.clamp(1.0 - self.config.clip_low, 1.0 + self.config.clip_high) * advantages
        per_token = unclipped.maximum(clipped)
        sums = {
            "ratio": _sum(ratio, trained),
            "clip_fraction": _sum((clipped > unclipped).to(ratio.dtype), trained),
        }
        if self.config.correction != "none":
            rollout_logprobs = columns["rollout_logprobs"].masked_fill(~trained, 0.0)
            old_logprobs = inputs.old_logprobs.masked_fill(~trained, 0.0)
            correction, limited = correction_weights(old_logprobs, rollout_logprobs, self.config)
            per_token = per_token * correction
            sums["correction_weight"] = _sum(correction, trained)
            sums["correction_fraction"] = _sum(limited, trained)
        if "ref_logprobs" in columns:
            reference = columns["ref_logprobs"].masked_fill(~trained, 0.0)
            kl = kl_divergence(logprobs, reference, self.config.kl_estimator)
            sums["kl"] = _sum(kl, trained)
            if self.config.kl_coef > 0:
                per_token = per_token + self.config.kl_coef * kl
        if inputs.entropy is not None:
            entropy = inputs.entropy.masked_fill(~trained, 0.0)
            sums["entropy"] = _sum(entropy, trained)
            if self.needs_entropy:
                per_token = per_token - self.config.entropy_coef * entropy
        weight = inputs.weight.masked_fill(~trained, 0.0)
        return LossOutput(loss=(weight * per_token).sum(), sums=sums)


def _sum(values: Tensor, trained: Tensor) -> Tensor:
    """Return the detached sum of values [T] over trained tokens [T]."""
    return values.detach().masked_fill(~trained, 0.0).sum()


def _check(inputs: LossInputs, needs: Needs, needs_entropy: bool) -> None:
    """Raise ValueError if a needed input is missing or shapes differ."""
    for name in needs.loss:
        if name not in inputs.columns:
            raise ValueError(f"{name} is missing: the loss needs this column")
    if needs_entropy and inputs.entropy is None:
        raise ValueError("entropy is missing: algorithm.entropy_coef > 0 needs it")
    own = {name: getattr(inputs, name) for name in ("mask", "weight", "sequence", "entropy")}
    for name, tensor in {**own, **inputs.columns}.items():
        if tensor is not None and tensor.shape != inputs.logprobs.shape:
            raise ValueError(f"{name} is {list(tensor.shape)}, but logprobs is {list(inputs.logprobs.shape)}")
