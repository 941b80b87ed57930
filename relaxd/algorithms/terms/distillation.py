"""On-policy distillation: a teacher's log-probs as advantages."""

import numpy as np
from numpy.typing import NDArray


def distilled(
    advantages: NDArray[np.floating],
    student_logprobs: NDArray[np.floating],
    teacher_logprobs: NDArray[np.floating],
    mask: NDArray[np.uint8],
    coefficient: float,
) -> NDArray[np.float64]:
    """A_t - coefficient x (log π_student - log π_teacher): on-policy distillation, arXiv 2306.13649, in advantage form.

    The student's tokens are samples of the student, so that the difference estimates KL(student || teacher), the
    reverse divergence, at each token. It carries no gradient: the policy gradient does the rest.

    Args:
        advantages: [T], those of the rewards; zeros for distillation alone.
        student_logprobs: [T], the engine's, or those at the beginning of the step.
        teacher_logprobs: [T].
        mask: [T].
        coefficient: weight of the teacher.

    Returns:
        [T], 0 where mask is 0.

    Raises:
        ValueError: the arrays differ in length, or the teacher's log-prob of a trained token isn't finite: it must not
            count as agreement.
    """
    for name, column in (("student_logprobs", student_logprobs), ("teacher_logprobs", teacher_logprobs)):
        if column.shape != mask.shape:
            raise ValueError(f"{name} is {list(column.shape)}, but the mask is {list(mask.shape)}")
    trained = mask != 0
    if not np.isfinite(teacher_logprobs[trained]).all():
        raise ValueError("teacher_logprobs is NaN or infinite at a trained token: the group can't be distilled")
    difference = student_logprobs.astype(np.float64) - teacher_logprobs.astype(np.float64)
    return np.where(trained, advantages - coefficient * difference, 0.0)
