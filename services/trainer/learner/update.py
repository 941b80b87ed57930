"""The update of the weights: skipped if its loss or gradient isn't finite, else clipped and applied."""

import math

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


class NonFiniteGradients(ArithmeticError):
    """A replayed update that was applied before now has a loss or gradient that isn't finite. Nothing has changed."""


def update_weights(
    optimizer: MegatronOptimizer,
    schedule: OptimizerParamScheduler,
    *,
    step: int,
    loss: float,
    clip_grad: float,
    skip: bool | None,
) -> tuple[float, bool]:
    """Update the weights unless loss or gradient norm isn't finite. All ranks call it together and decide alike.

    Args:
        optimizer: Megatron's chained optimizer, with the step's gradients.
        schedule: of the learning rate; stepped before an update that is applied.
        step: number of the step, from 1, for errors.
        loss: the step's loss, the same on all ranks.
        clip_grad: largest norm of the gradient; 0 disables clipping.
        skip: for a replayed step, whether its update was skipped before; None decides.

    Returns:
        The gradient norm before clipping, and whether the update was skipped.

    Raises:
        NonFiniteGradients: `skip` is False, but loss or gradient norm isn't finite.
    """
    norm = _gradient_norm(optimizer)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if skip is False and not finite:
        raise NonFiniteGradients(
            f"the update of step {step} was applied before, but in the replay its loss is {loss} and its gradient norm "
            f"{norm}"
        )
    skipped = not finite if skip is None else skip
    if not skipped:
        schedule.step(1)
        _clip_and_step(optimizer, clip_grad, norm)
    return norm, skipped


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
