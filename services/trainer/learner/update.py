"""The update of the weights: skipped if a loss or gradient isn't finite, else clipped and applied. Its statistics, and
the limit of consecutive skips.

Policy and critic are updated together or not at all, so the ledger records one outcome per update.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from collections.abc import Mapping
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from services.trainer.batch.step_plan import OUTCOME, StepPlan
from services.trainer.learner.data_parallel import DataParallel


class NonFiniteGradients(ArithmeticError):
    """Raised if an update that was applied before has an infinite or NaN loss or gradient when replayed.

    No weights have changed.
    """


@dataclass(frozen=True)
class PendingUpdate:
    """One model's part of a weight update."""

    optimizer: MegatronOptimizer
    """Chained optimizer of Megatron, whose parameters have their gradients."""
    schedule: OptimizerParamScheduler
    """Learning-rate schedule of the model."""
    loss: float
    """Loss of the model in this update, the same on all ranks."""
    clip_grad: float
    """Maximum gradient norm, to which the gradient is clipped; 0 disables clipping."""


def update_weights(
    parts: Sequence[PendingUpdate], *, step: int, first: bool, skip: bool | None
) -> tuple[list[float], bool]:
    """Update all models, or none if a loss or gradient norm isn't finite. All ranks call it together and decide alike.

    Args:
        parts: each model's part.
        step: number of the step, from 1, for errors.
        first: whether no earlier update of the step was applied; the schedules then advance before this update.
        skip: for a replayed step, whether its update was skipped before; None decides.

    Returns:
        The gradient norms before clipping, and whether the update was skipped.

    Raises:
        NonFiniteGradients: `skip` is False, but a loss or gradient norm isn't finite.
    """
    # Megatron sums the squares over the whole world in float32, so all ranks get the same number. It is NaN or infinite
    # if any rank's share has a NaN or an infinity, or if the sum overflows.
    for part in parts:
        part.optimizer.prepare_grads()
    norms = [float(part.optimizer.get_grad_norm()) for part in parts]
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


def reduce_gradients(model: DataParallel, normalizer: float) -> None:
    """Sum gradients over the ranks that share parameters, and divide them by `normalizer`. All ranks call this."""
    finalize_model_grads([model])
    if normalizer != 1.0:
        model.scale_gradients(1.0 / normalizer)


def _clip_and_step(optimizer: MegatronOptimizer, clip_grad: float, norm: float) -> None:
    """Clip the gradients and update the weights, as `MegatronOptimizer.step` does after computing the norm.

    Args:
        optimizer: Megatron's chained optimizer.
        clip_grad: maximum norm; 0 disables clipping.
        norm: the gradients' norm, finite.
    """
    for one in optimizer.chained_optimizers:
        parameters = one.get_parameters()
        if clip_grad > 0 and parameters:
            decoupled = one.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(parameters, clip_grad, norm, decoupled)
    optimizer.step_with_ready_grads()


BY_EPOCH = ("loss", "grad_norm", "ratio", "clip_fraction")
"""Names of the metrics that a step of several epochs also reports for each epoch."""

UNWEIGHTED = ("loss", "grad_norm", "value_loss", "value_grad_norm")
"""Names of the metrics whose mean over a step's updates isn't weighted by tokens."""


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """Statistics of one optimizer update, the same on all ranks."""

    step: int
    """Number of the step that the update belongs to, counted from 1."""
    loss: float
    """Loss of the update: the sum over its tokens, divided by the normalizer."""
    grad_norm: float
    """Gradient norm before clipping."""
    skipped: bool
    """True if the update was skipped, leaving weights, optimizer and schedule unchanged."""
    lr: float
    """Learning rate of the last applied update."""
    tokens: int
    """Number of trained tokens in the update, over all ranks."""
    metrics: dict[str, float]
    """Further metrics: sums that the loss reports, per token (kl, entropy, clip_fraction ...), `routing_metrics`,
    `mismatch_metrics` of the engine's and the trainer's log-probs, and the critic's metrics."""
    cause: str = ""
    """Part of the algorithm that made the loss infinite or NaN; empty if the loss's inputs or the critic did."""

    @property
    def shown(self) -> str:
        """Losses and gradient norms of the update as text, for error messages."""
        critic = ""
        if "value_loss" in self.metrics:
            critic = f"; critic: loss {self.metrics['value_loss']:g}, gradient norm {self.metrics['value_grad_norm']:g}"
        cause = f" ({self.cause})" if self.cause else ""
        return f"loss {self.loss:g}, gradient norm {self.grad_norm:g}{critic}{cause}"

    @property
    def values(self) -> dict[str, float]:
        """All metrics of the update by name, as a step with this update alone reports them."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr, **self.metrics}


def step_metrics(updates: Sequence[UpdateStats], epochs: int) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        updates: the step's updates, in order; at least one.
        epochs: number of epochs, each with the same number of updates.

    Returns:
        The values of a single update. For several updates: means over the applied ones (over all, if none was applied),
        weighted by trained tokens except for losses and gradient norms; maxima for names that end in "_max"; the last
        learning rates. For several epochs also `BY_EPOCH` of each epoch, such as clip_fraction_epoch_2.
        skipped_updates is the number of skipped updates.
    """
    found = _merged(updates)
    if epochs > 1:
        size = len(updates) // epochs
        for epoch in range(epochs):
            values = _merged(updates[epoch * size : (epoch + 1) * size])
            found |= {f"{name}_epoch_{epoch + 1}": values[name] for name in BY_EPOCH if name in values}
    return found | {"skipped_updates": float(sum(update.skipped for update in updates))}


def _merged(updates: Sequence[UpdateStats]) -> dict[str, float]:
    chosen = [update for update in updates if not update.skipped] or updates
    names = dict.fromkeys(name for update in chosen for name in update.values)
    return {name: _merge(name, [update for update in chosen if name in update.values]) for name in names}


def _merge(name: str, updates: Sequence[UpdateStats]) -> float:
    """Return a step's value of one metric, from the values of its updates."""
    values = [update.values[name] for update in updates]
    if len(values) == 1 or name in ("lr", "value_lr"):
        return values[-1]
    if name.endswith("_max"):
        return max(values)
    weights = [1 if name in UNWEIGHTED else update.tokens for update in updates]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(sum(weights), 1)


NAMED_GROUPS = 8
"""Maximum number of groups that an error names per step; the log and the ledger name all."""


class TooManySkippedUpdates(ArithmeticError):
    """Raised if more consecutive updates were skipped than trainer.max_skipped_updates allows."""


class SkippedUpdates:
    """Counts the updates skipped since the last applied one. After a restart, the ledger provides them."""

    def __init__(self, max_skipped: int) -> None:
        """`max_skipped`: maximum number of consecutive skipped updates (trainer.max_skipped_updates)."""
        self._max_skipped = max_skipped
        self._row: list[tuple[int, Sequence[str]]] = []
        """Step number and group ids of each update skipped since the last applied update."""
        self._applied = 0
        """Step number of the last applied update."""

    def record(self, step: int, groups: Sequence[str], *, skipped: bool) -> None:
        """Record whether an update was skipped. Call this for every update, in order. `groups`: its groups' ids."""
        self._row = [*self._row, (step, groups)] if skipped else []
        self._applied = self._applied if skipped else step

    def record_step(self, step: int, plan: Mapping[str, Any]) -> None:
        """Record all updates of a committed step, as its plan in the ledger tells them."""
        if not plan.get(OUTCOME):  # as in most steps: no parsing, so that the ledger is read quickly
            self.record(step, plan["groups"], skipped=False)
            return
        parsed = StepPlan.from_json(plan)
        for index, mini_batch in enumerate(parsed.updates):
            self.record(step, parsed.groups_of(mini_batch), skipped=index in plan[OUTCOME])

    def check(self, step: int, groups: Sequence[str], cause: str = "") -> None:
        """Raise TooManySkippedUpdates if one more skipped update exceeds the limit.

        Args:
            step: the update's step, which isn't committed.
            groups: ids of the update's groups.
            cause: `UpdateStats.cause` of the update.
        """
        if len(self._row) < self._max_skipped:
            return
        row = [*self._row, (step, groups)]
        by_step: dict[int, dict[str, None]] = {}
        for number, names in row:
            by_step.setdefault(number, {}).update(dict.fromkeys(names))
        steps = "; ".join(f"step {number}: {_named(list(names))}" for number, names in by_step.items())
        raise TooManySkippedUpdates(
            f"{len(row)} update{'s' * (len(row) > 1)} in a row had a loss or a gradient that isn't finite, more than "
            f"trainer.max_skipped_updates = {self._max_skipped} ({steps}). The weights are those of step "
            f"{min(self._applied, step - 1)}; the groups of step {step} are dropped. {cause + '. ' if cause else ''}"
            "Check their rewards and advantages; if they are right, export the newest checkpoint and start a run from "
            "it with a lower trainer.optimizer.lr"
        )


def _named(groups: Sequence[str]) -> str:
    more = len(groups) - NAMED_GROUPS
    return ", ".join(groups[:NAMED_GROUPS]) + (f" and {more} more" if more > 0 else "")
