"""Terms of the loss of each token: clipping, corrections, KL, excluded tokens, and their aggregation. Tensor methods
only: no torch import.

Corrections: the engine's probabilities differ from the trainer's even with equal weights (kernels, precision, choice of
experts), and in an asynchronous run the engine had older weights. Both make the policy gradient off-policy. Multiplying
each token's term by

    w = pi_train,old(y_t) / pi_rollout(y_t)

removes the bias of each token, but w can be huge, so it is limited.

Aggregation: the step's loss is Σ weight x loss of a token / normalizer. Weights and normalizer don't depend on how the
step is divided into micro-batches and among ranks.

Excluded tokens keep their place in the divisors of the loss, and their KL and entropy terms, except an unbiased KL
term, which has the ratio as a factor.

Distillation: a teacher's log-probs as advantages, or as a divergence in the loss.

KL: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relaxd.config.algorithm_shared import Aggregation, ClippedConfig, Divergence, KLEstimator, PolicyGradientConfig

if TYPE_CHECKING:
    from torch import Tensor

    from relaxd.algorithms.base import LossInputs

MAX_LOG_RATIO = 20.0
"""Limit of the absolute value of log-ratios: they are clamped to it before exp, so that ratios stay finite."""


def correction_weights(
    train_logprobs: Tensor, rollout_logprobs: Tensor, config: PolicyGradientConfig
) -> tuple[Tensor, Tensor]:
    """Return the correction weight of each token's policy-gradient term, and where that weight was limited.

    The weight follows from w = pi_train,old(y_t) / pi_rollout(y_t), by `config.correction`:

    - none: 1.
    - tis: clip(w, tis_clip_low, tis_clip). Truncated importance sampling: Yao et al. 2025, "Your efficient RL framework
      secretly brings you off-policy RL training"; the truncation is that of Ionides 2008. The lower limit, 0 by
      default, is slime's.
    - icepop: w if icepop_low <= w <= icepop_high, else 0, which leaves the token out. "Every Step Evolves", arXiv
      2510.18855, section on IcePop.

    Both are detached: no gradient goes through the weights.

    Args:
        train_logprobs: [T], the trainer's log-probs under the weights at the start of the step.
        rollout_logprobs: [T], the engine's log-probs.
        config: the correction and its limits.

    Returns:
        Weights [T] >= 0, and [T] 1 where w was limited or the token left out, else 0.
    """
    ratio = (train_logprobs.detach() - rollout_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    match config.correction:
        case "none":
            return ratio.new_ones(ratio.shape), ratio.new_zeros(ratio.shape)
        case "tis":
            limited = (ratio < config.tis_clip_low) | (ratio > config.tis_clip)
            return ratio.clamp(config.tis_clip_low, config.tis_clip), limited.to(ratio.dtype)
        case "icepop":
            limited = (ratio < config.icepop_low) | (ratio > config.icepop_high)
            return ratio.masked_fill(limited, 0.0), limited.to(ratio.dtype)


def token_weights(aggregation: Aggregation, mask: NDArray[np.uint8], lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return the weight of each token of a group: 0 where mask is 0, else

    - token_mean, sample_sum, constant_length: 1.
    - sample_mean: 1 / trained tokens of the token's sample.
    - group_mean: n / trained tokens of the group.

    Args:
        aggregation: one of the above.
        mask: uint8 [T], 1 where the token is trained on, the group's samples one after the other.
        lengths: int32 [n], tokens of each sample, of all its sequences; they add up to T.

    Returns:
        float32 [T].

    Raises:
        ValueError: lengths don't add up to T.
    """
    if int(lengths.sum()) != mask.size:
        raise ValueError(f"lengths add up to {int(lengths.sum())}, but mask has {mask.size} tokens")
    trained = (mask != 0).astype(np.float32)
    match aggregation:
        case "sample_mean":
            sample_of_token = np.repeat(np.arange(lengths.size), lengths)
            trained_per_sample = np.bincount(sample_of_token, weights=trained, minlength=lengths.size)
            return (trained / np.maximum(trained_per_sample, 1)[sample_of_token]).astype(np.float32)
        case "group_mean":
            return (trained * (lengths.size / max(int(np.count_nonzero(trained)), 1))).astype(np.float32)
        case _:
            return trained


def normalizer(aggregation: Aggregation, trained_tokens: int, samples: int, constant_length: int) -> float:
    """Return the divisor of the step's summed loss, at least 1.

    token_mean: trained_tokens. sample_mean, group_mean, sample_sum: samples. constant_length: samples x
    constant_length.

    Args:
        aggregation: one of the above.
        trained_tokens: tokens with mask 1 in the whole step, over all ranks.
        samples: samples in the whole step, over all ranks, those without a trained token included.
        constant_length: tokens.
    """
    match aggregation:
        case "token_mean":
            divisor = trained_tokens
        case "constant_length":
            divisor = samples * constant_length
        case _:
            divisor = samples
    return float(max(divisor, 1))


def clipped_loss(ratio: Tensor, advantages: Tensor, config: ClippedConfig) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss of each token: arXiv 1707.06347, equation 7.

    It is max(-r A, -clip(r, 1 - clip_low, 1 + clip_high) A), with ratio r and advantage A. With dual_clip c, the loss
    of tokens with A < 0 is at most -c A: Dual-Clip PPO, arXiv 1912.09729.

    Args:
        ratio: [T], r, with gradient.
        advantages: [T], A.
        config: the limits.

    Returns:
        Loss of each token [T], and bool [T], True where the clipped term is larger, so that the token has no gradient.
        Tokens that only dual_clip limits are False, as in verl.
    """
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high) * advantages
    loss = unclipped.maximum(clipped)
    if config.dual_clip > 0:
        loss = loss.minimum(-config.dual_clip * advantages).where(advantages < 0, loss)
    return loss, clipped > unclipped


def has_veto(config: PolicyGradientConfig) -> bool:
    """Return True if the settings exclude tokens whose probability ratio is extreme (veto_high, veto_low)."""
    return config.veto_high > 0 or config.veto_low > 0


def vetoed(log_ratios: list[Tensor], trained: Tensor, inputs: LossInputs, config: PolicyGradientConfig) -> Tensor:
    """Return True for tokens with an extreme probability ratio: above veto_high or below veto_low.

    PPO's clip doesn't limit the ratio of a token with a negative advantage from above, so one token whose probability
    rose from 1e-8 to 1e-3 would have 1e5 times the gradient of any other. A NaN ratio isn't excluded, so that it shows.

    Args:
        log_ratios: logarithms of the ratios to check, each [T].
        trained: bool [T].
        inputs: the micro-batch, for its sequences.
        config: the limits; with veto_sequences one extreme token excludes its whole sequence.

    Returns:
        bool [T].
    """
    extreme = ~trained
    for log_ratio in log_ratios:
        if config.veto_high > 0:
            extreme = extreme | (log_ratio > math.log(config.veto_high))
        if config.veto_low > 0:
            extreme = extreme | (log_ratio < math.log(config.veto_low))
    extreme = extreme & trained
    if config.veto_sequences:
        extreme = (inputs.segment_sum(extreme.to(inputs.logprobs.dtype)) > 0)[inputs.sequence] & trained
    return extreme


def off_policy_sequences(
    rollout_log_ratio: Tensor, advantages: Tensor, trained: Tensor, inputs: LossInputs, delta: float
) -> Tensor:
    """Return True for tokens that off-policy sequence masking leaves out: DeepSeek-V3.2, arXiv 2512.02556, equation 9.

    These have A < 0 and a sequence whose mean log(engine's probability / current probability) is above delta: the
    policy has moved away from a bad answer and can learn little more from it.

    Args:
        rollout_log_ratio: [T], log(current / engine's probability), detached, 0 where not trained.
        advantages: [T].
        trained: bool [T].
        inputs: the micro-batch, for its sequences.
        delta: the limit.

    Returns:
        bool [T].
    """
    count = inputs.segment_sum(trained.to(rollout_log_ratio.dtype)).clamp(min=1.0)
    divergence = inputs.segment_sum(-rollout_log_ratio) / count
    return (divergence > delta)[inputs.sequence] & (advantages < 0) & trained


def kl_divergence(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token; with l = logprobs - ref_logprobs:

    - k1: l. Unbiased, but as a loss its expected gradient is zero, and it may be negative.
    - k2: l² / 2. Biased, but its gradient is that of the divergence.
    - k3: exp(-l) - 1 + l. Unbiased, never negative; may overflow where the reference is much likelier.
    - low_var_kl: k3 with l clamped to ±20 and the result to ±10, as in verl.

    Args:
        logprobs: [T], with gradient.
        ref_logprobs: [T].
        estimator: one of the above.

    Returns:
        [T], with gradient to logprobs.
    """
    log_ratio = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return log_ratio.square() / 2
        case "k3":
            return _k3(log_ratio)
        case "low_var_kl":
            return _k3(log_ratio.clamp(-20.0, 20.0)).clamp(-10.0, 10.0)


def _k3(log_ratio: Tensor) -> Tensor:
    # expm1, because exp(-l) - 1 is inexact for small l in float32.
    return (-log_ratio).expm1() + log_ratio


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return PPO's value loss of each token, with the usual clip.

    It is max((V - G)², (V_old + clip(V - V_old, ±clip) - G)²) / 2, with value V and return G. The factor 1/2 is verl's.

    Args:
        values: [T], V, with gradient.
        old_values: [T], V_old, the values from which the returns were computed.
        returns: [T], G; see `generalized_advantages`.
        clip: maximum change of a value that lowers the loss, > 0.

    Returns:
        Loss of each token [T], and bool [T], True where |V - V_old| > clip.
    """
    change = values - old_values
    clipped = old_values + change.clamp(-clip, clip)
    return (values - returns).square().maximum((clipped - returns).square()) / 2, change.abs() > clip


SMALLEST_REST = 1e-6
"""Minimum total probability of all tokens that aren't candidates; smaller values are rounding errors of float32."""


def distilled(
    advantages: NDArray[np.floating],
    student_logprobs: NDArray[np.floating],
    teacher_logprobs: NDArray[np.floating],
    mask: NDArray[np.uint8],
    coefficient: float,
) -> NDArray[np.float64]:
    """Return each token's advantage with the teacher's part: on-policy distillation, arXiv 2306.13649, as an advantage.

    A_t - coefficient x (log π_student - log π_teacher).

    The student's tokens are samples of the student, so that the difference estimates KL(student || teacher), the
    reverse divergence, at each token. It carries no gradient: the policy gradient uses it as an advantage.

    The divergence summed over candidates (`ComparedCandidates`) can't be used in this way: it depends only on the
    preceding tokens, so as an advantage D it would be a mere baseline (Williams 1992), E[D grad log π_student] = 0. It
    works as a loss term with its own gradient.

    Args:
        advantages: [T], those of the rewards; zeros for distillation alone.
        student_logprobs: [T], those at the beginning of the step, or the engine's.
        teacher_logprobs: [T].
        mask: [T].
        coefficient: weight of the teacher.

    Returns:
        [T], 0 where mask is 0.

    Raises:
        ValueError: the arrays differ in length, or the teacher's log-prob of a trained token isn't finite, which must
            not count as agreement.
    """
    for name, column in (("student_logprobs", student_logprobs), ("teacher_logprobs", teacher_logprobs)):
        if column.shape != mask.shape:
            raise ValueError(f"{name} is {list(column.shape)}, but the mask is {list(mask.shape)}")
    trained = mask != 0
    if not np.isfinite(teacher_logprobs[trained]).all():
        raise ValueError("teacher_logprobs is NaN or infinite at a trained token: the group can't be distilled")
    difference = student_logprobs.astype(np.float64) - teacher_logprobs.astype(np.float64)
    return np.where(trained, advantages - coefficient * difference, 0.0)


@dataclass(frozen=True)
class ComparedCandidates:
    """Log-probs of candidates under student and teacher, k for each of T tokens.

    All other tokens of the vocabulary count as one more candidate. This makes both sides distributions, so the
    divergences below are never negative, 0 only if all candidates agree, and at most those of the whole vocabulary,
    which they equal if every token is a candidate. Without the additional candidate, the student could lower the sum of
    p log(p / q) by moving probability away from the candidates, whatever the teacher thinks of the other tokens.
    """

    student: Tensor
    """The student's log-prob of each candidate, [T, k], with gradient."""
    teacher: Tensor
    """The teacher's log-prob of each candidate, [T, k]; finite."""
    present: Tensor
    """True for slots that hold a candidate, False for empty ones; bool [T, k]."""

    def divergence(self, kind: Divergence) -> Tensor:
        """Return the divergence between student and teacher at each token, [T]; p: student's, q: teacher's probability.

        - reverse_kl: KL(p || q) = sum p log(p / q). The gradient in expectation of `distilled`, without its noise.
        - forward_kl: KL(q || p) = sum q log(q / p).
        - jensen_shannon: KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2, that of arXiv 2306.13649 with
          beta = 0.5.
        """
        rest = (_log_rest(self.student_mass), _log_rest(self.teacher_mass))
        of_candidates = _terms(kind, self.student, self.teacher)
        return of_candidates.masked_fill(~self.present, 0.0).sum(-1) + _terms(kind, *rest)

    @property
    def student_mass(self) -> Tensor:
        """Total probability that the student gives to the candidates, at each token; [T]."""
        return self.student.exp().masked_fill(~self.present, 0.0).sum(-1)

    @property
    def teacher_mass(self) -> Tensor:
        """Total probability that the teacher gives to the candidates, at each token; [T]."""
        return self.teacher.exp().masked_fill(~self.present, 0.0).sum(-1)

    @property
    def overlap(self) -> Tensor:
        """Share of the student's top tokens that are also top tokens of the teacher, at each token; [T].

        Only meaningful if both models name candidates.
        """
        return 2 - 2 * self.present.sum(-1) / max(self.present.shape[-1], 1)


def _terms(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """Return the summand of a divergence for each pair of a student's and a teacher's log-prob."""
    match kind:
        case "reverse_kl":
            return student.exp() * (student - teacher)
        case "forward_kl":
            return teacher.exp() * (teacher - student)
        case "jensen_shannon":
            mean = student.logaddexp(teacher) - math.log(2)
            return (student.exp() * (student - mean) + teacher.exp() * (teacher - mean)) / 2


def _log_rest(mass: Tensor) -> Tensor:
    return (1 - mass).clamp(min=SMALLEST_REST).log()
