"""Statistics of optimizer updates, and the metrics of a step that follow from those of its updates."""

from collections.abc import Sequence
from dataclasses import dataclass

BY_EPOCH = ("loss", "grad_norm", "ratio", "clip_fraction")
"""Metrics that a step of several epochs also has for each of them."""

UNWEIGHTED = ("loss", "grad_norm", "value_loss", "value_grad_norm")
"""Metrics that are of an update as a whole, however many tokens it has."""


@dataclass(frozen=True, kw_only=True)
class UpdateStats:
    """Statistics of one optimizer update, the same on all ranks."""

    step: int
    """Number of its step, from 1."""
    loss: float
    """Summed loss divided by the normalizer."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    skipped: bool
    """True if the update was skipped, leaving weights, optimizer and schedule unchanged."""
    lr: float
    """Learning rate of the last applied update."""
    tokens: int
    """Trained tokens in the update, over all ranks."""
    metrics: dict[str, float]
    """The loss's sums divided by `tokens` (kl, entropy, clip_fraction ...), `expert_load.metrics`, the difference
    between the engine's and the trainer's log-probs (`mismatch.metrics`), and the critic's numbers."""
    cause: str = ""
    """Why its loss isn't finite, if the algorithm is to blame: nothing that the loss is made of is."""

    @property
    def shown(self) -> str:
        """Its losses and norms, as an error shows them."""
        critic = ""
        if "value_loss" in self.metrics:
            critic = f"; critic: loss {self.metrics['value_loss']:g}, gradient norm {self.metrics['value_grad_norm']:g}"
        cause = f" ({self.cause})" if self.cause else ""
        return f"loss {self.loss:g}, gradient norm {self.grad_norm:g}{critic}{cause}"

    @property
    def values(self) -> dict[str, float]:
        """All of it by name, as a step of one update reports it."""
        return {"loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr, **self.metrics}


def step_metrics(updates: Sequence[UpdateStats], epochs: int) -> dict[str, float]:
    """Return the metrics of a step.

    Args:
        updates: the step's updates, in order; at least one.
        epochs: number of epochs that they are of, each with as many.

    Returns:
        For one update its values. Otherwise their means over the applied updates (over all, if none was applied), each
        weighted by its trained tokens; losses and norms of gradients count all updates alike; of names that end in
        "_max" the largest; learning rates of the last. For several epochs also `BY_EPOCH` of each, such as
        clip_fraction_epoch_2. skipped_updates is the number of those that were skipped.
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
    """Merge the values that updates have under a name."""
    values = [update.values[name] for update in updates]
    if len(values) == 1 or name in ("lr", "value_lr"):
        return values[-1]
    if name.endswith("_max"):
        return max(values)
    weights = [1 if name in UNWEIGHTED else update.tokens for update in updates]
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(sum(weights), 1)
