"""On-policy distillation: a teacher's log-probs as advantages, or as a divergence in the loss.

Tensor methods only: no torch import.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relaxd.config.algorithm_shared import Divergence

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST_REST = 1e-6
"""Minimum total probability of the tokens that aren't candidates: less is lost in float32 rounding of the sums."""


def distilled(
    advantages: NDArray[np.floating],
    student_logprobs: NDArray[np.floating],
    teacher_logprobs: NDArray[np.floating],
    mask: NDArray[np.uint8],
    coefficient: float,
) -> NDArray[np.float64]:
    """A_t - coefficient x (log π_student - log π_teacher): on-policy distillation, arXiv 2306.13649, in advantage form.

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
    """[T, k]: log-probs, with gradient."""
    teacher: Tensor
    """[T, k]: log-probs; finite."""
    present: Tensor
    """bool [T, k]: True where the slot holds a candidate."""

    def divergence(self, kind: Divergence) -> Tensor:
        """Return a divergence at each token, [T], with p the student's and q the teacher's probabilities.

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
        """The student's probability of all candidates together, [T]."""
        return self.student.exp().masked_fill(~self.present, 0.0).sum(-1)

    @property
    def teacher_mass(self) -> Tensor:
        """The teacher's probability of all candidates together, [T]."""
        return self.teacher.exp().masked_fill(~self.present, 0.0).sum(-1)

    @property
    def overlap(self) -> Tensor:
        """Share of the student's top candidates that are also among the teacher's, for candidates of both models;
        [T]."""
        return 2 - 2 * self.present.sum(-1) / max(self.present.shape[-1], 1)


def _terms(kind: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """Return each token's term of a divergence, from the log-probs of both."""
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
