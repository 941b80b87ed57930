"""The update of the weights: skipped if a loss or gradient isn't finite, else clipped and applied.

Actor and critic are updated together or not at all, so that a ledger says of an update whether it was skipped.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class NonFiniteGradients(ArithmeticError):
    """A replayed update that was applied before now has a loss or gradient that isn't finite. Nothing has changed."""


@dataclass(frozen=True)
class PendingUpdate:
    """One model's part of an update."""

    optimizer: MegatronOptimizer
    """Megatron's chained optimizer, with the gradients."""
    schedule: OptimizerParamScheduler
    """Of the learning rate."""
    loss: float
    """The model's loss, the same on all ranks."""
    clip_grad: float
    """Largest norm of the gradient; 0 disables clipping."""


def update_weights(
    parts: Sequence[PendingUpdate], *, step: int, first: bool, skip: bool | None
) -> tuple[list[float], bool]:
    """Update all models, or none if a loss or gradient norm isn't finite. All ranks call it together and decide alike.

    Args:
        parts: the models' parts.
        step: number of the step, from 1, for errors.
        first: whether no earlier update of the step was applied: the schedules are then stepped before this one is.
        skip: for a replayed step, whether its update was skipped before; None decides.

    Returns:
        The gradient norms before clipping, and whether the update was skipped.

    Raises:
        NonFiniteGradients: `skip` is False, but a loss or gradient norm isn't finite.
    """
    norms = [_gradient_norm(part.optimizer) for part in parts]
    finite = all(math.isfinite(part.loss) and math.isfinite(norm) for part, norm in zip(parts, norms, strict=True))
    if skip is False and not finite:
        numbers = " and the critic's: ".join(
            f"its loss is {part.loss} and its gradient norm {norm}" for part, norm in zip(parts, norms, strict=True)
        )
        raise NonFiniteGradients(f"an update of step {step} was applied before, but in the replay {numbers}")
    skipped = not finite if skip is None else skip
    if not skipped:
        for part, norm in zip(parts, norms, strict=True):
            if first:
                part.schedule.step(1)
            _clip_and_step(part.optimizer, part.clip_grad, norm)
    return norms, skipped


def _gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Prepare the gradients for the update and return their norm over all ranks. All ranks call it together.

    Megatron sums the squares over the whole world in float32, so all ranks get the same number. It is NaN or infinite
    if any rank's share has a NaN or an infinity, or if the sum overflows.
    """
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())


def _clip_and_step(optimizer: MegatronOptimizer, clip_grad: float, norm: float) -> None:
    """Clip the gradients and update the weights, as `MegatronOptimizer.step` does after computing the norm.

    Args:
        optimizer: Megatron's chained optimizer.
        clip_grad: largest norm; 0 disables clipping.
        norm: the result of `_gradient_norm`, finite.
    """
    for one in optimizer.chained_optimizers:
        parameters = one.get_parameters()
        if clip_grad > 0 and parameters:
            decoupled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()
