"""Base of the algorithms. Subclasses add the baseline of the advantages and the policy-gradient term of the loss.

They override `sample_advantages` (or `token_advantages`) and `policy_term`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import advantage_terms, loss_terms
from relaxd.algorithms.advantage_terms import group_relative, rewards_equal
from relaxd.algorithms.base import (
    NO_COLUMNS,
    OF_CANDIDATES,
    Advantages,
    Candidates,
    Filtered,
    LossInputs,
    LossOutput,
    Needs,
    check_group,
    check_inputs,
)
from relaxd.algorithms.loss_terms import (
    MAX_LOG_RATIO,
    ComparedCandidates,
    clipped_loss,
    correction_weights,
    distilled,
    kl_divergence,
)
from relaxd.algorithms.results import shown
from relaxd.config.algorithm_shared import ClippedConfig, NormalizedConfig, PolicyGradientConfig, RatioConfig
from relaxd.reasons import DropReason

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """Values of a micro-batch's tokens, from which `policy_term` is computed. Float [T] unless stated otherwise; 0
    where the mask is 0."""

    inputs: LossInputs
    """All inputs of the loss, for instance for their method `segment_sum`."""
    trained: Tensor
    """Loss mask: True for tokens that are trained on; bool [T]."""
    logprobs: Tensor
    """Log-probs of the tokens under the weights being trained, with gradient."""
    old_logprobs: Tensor
    """Log-probs of the tokens under the old policy, without gradient."""
    rollout_logprobs: Tensor
    """Log-probs of the tokens as the engine reported them."""
    log_ratio: Tensor
    """Logarithm of each token's probability ratio, logprobs - old_logprobs, clamped to ± MAX_LOG_RATIO so that its
    exponential is finite. Has a gradient except where it is clamped."""
    advantages: Tensor
    """Advantage of each token."""

    @property
    def ratio(self) -> Tensor:
        """Ratio of each token's probability under the trained weights to that under the old policy."""
        return self.log_ratio.exp()

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Return for each token the mean of `values` over the trained tokens of its sequence.

        Differentiable, and correct if a context-parallel rank has only some of a sequence's tokens.

        Args:
            values: [T], 0 where the mask is 0.

        Returns:
            [T].
        """
        count = self.inputs.segment_sum(self.trained.to(values.dtype)).clamp(min=1.0)
        return (self.inputs.segment_sum(values) / count)[self.inputs.sequence]


@dataclass(frozen=True)
class PolicyTerm:
    """Policy-gradient term of the loss, per token; all fields are [T]."""

    loss: Tensor
    """Loss of each token, with gradient."""
    ratio: Tensor
    """Probability ratio of each token, for metrics."""
    clipped: Tensor
    """True for tokens whose gradient is clipped, for metrics; bool."""


class PolicyGradient:
    """Base class of the bundled algorithms; a user's own may extend it. Settings: `PolicyGradientConfig`."""

    Config: ClassVar[type[PolicyGradientConfig]] = PolicyGradientConfig
    """Class of the algorithm's settings."""

    def __init__(self, config: PolicyGradientConfig) -> None:
        self.config = config

    # --- to override ------------------------------------------------------------------------------------------------

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the advantage of each sample of a group.

        Args:
            rewards: [n], finite.

        Returns:
            [n].
        """
        raise NotImplementedError

    def token_advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any]
    ) -> NDArray[np.float64]:
        """Return the advantage of each token: here the advantage of its sample, after the KL penalty is subtracted from
        rewards.

        Args:
            rewards: [n], finite.
            lengths: [n], adding up to T.
            columns: the columns of `Needs.advantages`.

        Returns:
            [T].

        Raises:
            ValueError: `sample_advantages` returned another shape.
        """
        if self.config.kl_reward_coef > 0:
            kl = advantage_terms.kl_estimates(
                columns[self._student_column], columns["ref_logprobs"], columns["loss_mask"]
            )
            sample_of_token = np.repeat(np.arange(lengths.size), lengths)
            rewards = rewards - self.config.kl_reward_coef * np.bincount(sample_of_token, kl, lengths.size)
        values = np.asarray(self.sample_advantages(rewards))
        if values.shape != rewards.shape:
            raise ValueError(f"sample_advantages() returned {shown(values)}: it must be [{rewards.size}], one a sample")
        return np.repeat(values, lengths)

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return the policy-gradient term of each token, before corrections and limits. A pure function."""
        raise NotImplementedError

    # --- the interface of algorithms --------------------------------------------------------------------------------

    @property
    def needs(self) -> Needs:
        """Columns of the board that the algorithm reads under its settings."""
        reference = ("ref_logprobs",) if self.config.needs_reference else ()
        teacher: tuple[str, ...] = ("teacher_logprobs",) if self.config.needs_teacher else ()
        top_k = self.config.distill_top_k
        if top_k:
            teacher = OF_CANDIDATES
        advantages: list[str] = []
        if self.config.kl_reward_coef > 0:
            advantages += ["loss_mask", self._student_column, "ref_logprobs"]
        if self.config.distill_coef > 0 and not self._distills_in_loss:
            advantages += ["loss_mask", self._student_column, "teacher_logprobs"]
        if self.config.mask_truncated:
            advantages += ["finish", "sample_of_sequence"]
        return Needs(
            loss=("rollout_logprobs", "advantages", *reference, *teacher),
            advantages=tuple(dict.fromkeys(advantages)),
            finite=("teacher_logprobs",) if self._distills_in_loss else (),
            old_logprobs=not self._old_is_engine or self.config.correction != "none",
            whitened=self.config.needs_whole_step,
            candidates=Candidates(self.config.distill_candidates, top_k) if top_k else None,
        )

    @property
    def needs_entropy(self) -> bool:
        """True if the entropy bonus is on."""
        return self.config.entropy_coef > 0

    def filtered(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any] = NO_COLUMNS
    ) -> Filtered | None:
        """Return `Filtered` for a group in which no sample would have an advantage, else None.

        Always returns None without drop_zero_variance. With mask_truncated, a group is filtered if all samples were cut
        off. Any group of several samples is filtered if its rewards are equal: after overlong shaping, without KL
        penalty and teacher.

        Args:
            rewards: float64 [n], finite.
            lengths: int32 [n].
            columns: with mask_truncated "finish" and "sample_of_sequence".

        Raises:
            ValueError: see `check_group`.
        """
        check_group(rewards, lengths)
        if not self.config.drop_zero_variance:
            return None
        if self.config.mask_truncated and self._cut(columns, rewards.size).all():
            return Filtered(DropReason.ALL_TRUNCATED)
        if rewards.size > 1 and rewards_equal(self._shaped(rewards, lengths)):
            return Filtered(DropReason.ZERO_VARIANCE)
        return None

    def advantages(
        self, rewards: NDArray[np.float64], lengths: NDArray[np.int32], columns: Mapping[str, Any] = NO_COLUMNS
    ) -> Advantages | Filtered:
        """Return the advantages of one group's tokens, or `Filtered`.

        Shapes rewards, filters, computes advantages, adds the teacher's part, sets those of truncated samples to 0.

        Args:
            rewards: float64 [n], finite.
            lengths: int32 [n].
            columns: the columns of `Needs.advantages`.

        Raises:
            ValueError: see `check_group`; a column is missing; or advantages have another shape, or one of them isn't
                finite or overflows float32.
        """
        check_group(rewards, lengths)
        for name in self.needs.advantages:
            if name not in columns:
                raise ValueError(f"{name} is missing: the advantages need this column")
        if (left_out := self.filtered(rewards, lengths, columns)) is not None:
            return left_out
        rewards = self._shaped(rewards, lengths)
        values = self.token_advantages(rewards, lengths, columns)
        # Before anything is added to them: numpy would make [T, T] of [T, 1] and [T].
        if np.shape(values) != (lengths.sum(),):
            raise ValueError(f"token_advantages() returned {shown(values)}: it must be [{lengths.sum()}], one a token")
        if self.config.distill_coef > 0 and not self._distills_in_loss:
            own, teachers = columns[self._student_column], columns["teacher_logprobs"]
            values = distilled(values, own, teachers, columns["loss_mask"], self.config.distill_coef)
        if self.config.mask_truncated:
            values = np.where(np.repeat(self._cut(columns, rewards.size), lengths), 0.0, values)
        if not (fits := np.abs(values) <= np.finfo(np.float32).max).all():
            worst = values[~fits][0]
            raise ValueError(
                f"an advantage is {worst:g}, from rewards up to {np.abs(rewards).max():g}: it must be finite, and not "
                "overflow float32"
            )
        return Advantages(values.astype(np.float32))

    def token_weights(self, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
        return loss_terms.token_weights(self.config.loss_aggregation, mask, lengths)

    def normalizer(self, trained_tokens: int, samples: int) -> float:
        config = self.config
        return loss_terms.normalizer(config.loss_aggregation, trained_tokens, samples, config.constant_length)

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of a micro-batch, summed over trained tokens, and sums for metrics.

        A token's loss is weight x (w x policy term + KL terms - entropy_coef x entropy).
        w is `correction_weights` (1 without a correction), and 0 for `excluded_tokens`. The old policy is the engine's,
        or the trainer's at the start of the step (old_logprobs = "current"). In a step of one update the forward pass
        computes the latter: the ratio is 1, and its gradient is that of the log-prob.

        Args:
            inputs: the micro-batch's tokens.

        Raises:
            ValueError: a column or entropy is needed and missing, or shapes differ; or `policy_term` returned no valid
                `PolicyTerm`.
        """
        check_inputs(inputs, self.needs, self.needs_entropy)
        config = self.config
        tokens = self._tokens(inputs)
        trained = tokens.trained
        term = self.policy_term(tokens)
        _check_term(term, tokens.logprobs)
        per_token = term.loss
        sums = {"ratio": term.ratio, "clip_fraction": term.clipped}
        if config.correction != "none":
            at_start = _masked(inputs.old_logprobs, trained)
            weights, limited = correction_weights(at_start, tokens.rollout_logprobs, config)
            per_token = per_token * weights
            sums |= {"correction_weight": weights, "correction_fraction": limited}
        rollout_log_ratio = tokens.logprobs.detach() - tokens.rollout_logprobs
        vetoed = ~trained
        if loss_terms.has_veto(config):
            vetoed = loss_terms.vetoed([rollout_log_ratio, tokens.log_ratio.detach()], trained, inputs, config)
            per_token = per_token.masked_fill(vetoed, 0.0)
            sums["veto_fraction"] = vetoed
        if config.opsm_delta > 0:
            left_out = loss_terms.off_policy_sequences(
                rollout_log_ratio, tokens.advantages, trained, inputs, config.opsm_delta
            )
            per_token = per_token.masked_fill(left_out, 0.0)
            sums["opsm_fraction"] = left_out
        if "ref_logprobs" in inputs.columns:
            kl = kl_divergence(tokens.logprobs, _masked(inputs.columns["ref_logprobs"], trained), config.kl_estimator)
            sums["kl"] = kl
            if config.kl_coef > 0:
                # With the ratio as a factor this term has extreme gradients, which the veto excludes.
                term_kl = (tokens.ratio * kl).masked_fill(vetoed, 0.0) if config.kl_unbiased else kl
                per_token = per_token + config.kl_coef * term_kl
        if "teacher_logprobs" in inputs.columns:
            teacher = _masked(inputs.columns["teacher_logprobs"], trained)
            sums["teacher_kl"] = kl_divergence(tokens.logprobs, teacher, "k1")
            if config.distill_loss_coef > 0:
                kl = kl_divergence(tokens.logprobs, teacher, config.distill_estimator)
                per_token = per_token + config.distill_loss_coef * kl
        if "candidates" in inputs.columns:
            compared = _compared(inputs, trained)
            sums["teacher_kl"] = compared.divergence("reverse_kl")
            sums["student_candidate_mass"] = compared.student_mass
            sums["teacher_candidate_mass"] = compared.teacher_mass
            if config.distill_candidates == "union":
                sums["candidate_overlap"] = compared.overlap
            per_token = per_token + config.distill_loss_coef * compared.divergence(config.distill_divergence)
        if inputs.entropy is not None:
            entropy = _masked(inputs.entropy, trained)
            sums["entropy"] = entropy
            if self.needs_entropy:
                per_token = per_token - config.entropy_coef * entropy
        weight = _masked(inputs.weight, trained)
        reported = {name: _masked(values.detach().to(weight.dtype), trained).sum() for name, values in sums.items()}
        return LossOutput(loss=(weight * per_token).sum(), sums=reported)

    def _shaped(self, rewards: NDArray[np.float64], lengths: NDArray[np.int32]) -> NDArray[np.float64]:
        return rewards.astype(np.float64) + advantage_terms.overlong_penalties(lengths, self.config)

    def _cut(self, columns: Mapping[str, Any], samples: int) -> NDArray[np.bool_]:
        return advantage_terms.truncated_samples(columns["finish"], columns["sample_of_sequence"], samples)

    @property
    def _student_column(self) -> str:
        """Name of the column with the student's log-probs from which advantages are computed."""
        return "old_logprobs" if self.config.student_logprobs == "current" else "rollout_logprobs"

    @property
    def _distills_in_loss(self) -> bool:
        """True if the loss subtracts the teacher's term from the advantages, with current log-probs.

        False if an earlier stage needs the final advantages: for normalisation, a critic's returns, or masking
        truncated samples.
        """
        config = self.config
        late = not (config.needs_whole_step or config.needs_critic or config.mask_truncated)
        return config.distill_coef > 0 and config.student_logprobs == "current" and late

    @property
    def _old_is_engine(self) -> bool:
        return isinstance(self.config, RatioConfig) and self.config.old_logprobs == "rollout"

    def _tokens(self, inputs: LossInputs) -> Tokens:
        trained = inputs.mask != 0
        # Masked before exp, because 0 x inf and its gradient are NaN.
        logprobs = _masked(inputs.logprobs, trained)
        rollout = _masked(inputs.columns["rollout_logprobs"], trained)
        old = rollout if self._old_is_engine else _masked(inputs.old_logprobs, trained)
        advantages = _masked(inputs.columns["advantages"], trained)
        if self._distills_in_loss:
            teacher = _masked(inputs.columns["teacher_logprobs"], trained)
            advantages = advantages - self.config.distill_coef * (logprobs.detach() - teacher)
        return Tokens(
            inputs=inputs,
            trained=trained,
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=rollout,
            log_ratio=(logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO),
            advantages=advantages,
        )


class GroupNormalized(PolicyGradient):
    """Base class of algorithms with advantages relative to the group's mean and standard deviation."""

    config: NormalizedConfig

    def sample_advantages(self, rewards: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each sample's advantage (R_i - mean(R)) / (std(R) + std_epsilon), [n].

        Without normalize_std it is R_i - mean(R).
        """
        config = self.config
        return group_relative(rewards, normalize_std=config.normalize_std, std_epsilon=config.std_epsilon)


class Clipped(PolicyGradient):
    """Base class of algorithms with PPO's clipped objective."""

    config: ClippedConfig

    def policy_term(self, tokens: Tokens) -> PolicyTerm:
        """Return PPO's clipped objective of each token: max(-r A, -clip(r) A), with ratio r and advantage A."""
        loss, clipped = clipped_loss(tokens.ratio, tokens.advantages, self.config)
        return PolicyTerm(loss, tokens.ratio, clipped)


def _check_term(term: PolicyTerm, logprobs: Tensor) -> None:
    """Check the result of a user's own `policy_term`: a scalar mean or [T, 1] would be broadcast silently."""
    if not isinstance(term, PolicyTerm):
        raise ValueError(f"policy_term() returned {shown(term)}: it must be PolicyTerm")
    for name in ("loss", "ratio", "clipped"):
        values = getattr(term, name)
        if getattr(values, "shape", None) != logprobs.shape:
            raise ValueError(f"policy_term() returned {name} {shown(values)}: it must be {list(logprobs.shape)}")
    if term.loss.dtype != logprobs.dtype:
        raise ValueError(f"policy_term() returned loss {shown(term.loss)}: it must be {shown(logprobs)}, as logprobs")


def _masked(values: Tensor, trained: Tensor) -> Tensor:
    """Return the values, [T], with 0 for tokens that aren't trained."""
    return values.masked_fill(~trained, 0.0)


def _compared(inputs: LossInputs, trained: Tensor) -> ComparedCandidates:
    """Return the candidates of student and teacher at each token; all slots of untrained tokens are empty."""
    assert inputs.candidate_logprobs is not None
    present = (inputs.columns["candidates"] >= 0) & trained.unsqueeze(-1)
    student, teacher = inputs.candidate_logprobs, inputs.columns["teacher_candidate_logprobs"]
    # Masked before exp, because 0 x inf and its gradient are NaN.
    return ComparedCandidates(student.masked_fill(~present, 0.0), teacher.masked_fill(~present, 0.0), present)
