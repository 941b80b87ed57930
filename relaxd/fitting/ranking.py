"""The layouts of the trainer that would fit, ranked by a predicted step time."""

from dataclasses import dataclass, replace

from relaxd.config import RunConfig
from relaxd.fitting.held import Hardware
from relaxd.fitting.host import Models
from relaxd.fitting.on_gpus import on_trainer
from relaxd.fitting.sizing import micro_batch, step_work
from relaxd.fitting.speed import predict
from relaxd.models.layouts import Layout, possible_layouts, problem


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    bytes: int
    """Bytes of its fullest GPU."""
    seconds: float
    """Predicted, for the trainer's part in a step."""


def rank_layouts(config: RunConfig, models: Models, hardware: Hardware, taken: int) -> list[Candidate]:
    """Return the layouts that fit, the fastest predicted first: of trainer.ranks, or of the fewest ranks above.

    Args:
        config: the run.
        models: the models in the trainer's ranks.
        hardware: the GPUs.
        taken: bytes of a GPU that another process holds.
    """
    ranks = config.trainer.ranks
    while ranks <= hardware.gpus_per_node:
        if found := _fitting(config, models, hardware, ranks, taken):
            return sorted(found, key=lambda one: (one.seconds, one.bytes))
        if config.run.colocate:  # as many ranks as the engines have GPUs
            break
        ranks += 1
    return []


def _fitting(config: RunConfig, models: Models, hardware: Hardware, ranks: int, taken: int) -> list[Candidate]:
    work, trainer = step_work(config, models), config.trainer
    element, found = micro_batch(config, config.micro_batch_tokens).element, []
    offload = element < 4 and trainer.optimizer.moments == "float32"
    for bare in possible_layouts(models.policy, ranks, trainer.groups_per_step, offload=offload):
        layout = replace(
            bare,
            activations_on_host=trainer.activation_offload_bytes,
            shard_gradients=trainer.shard_gradients,
            overlap_grad_reduce=trainer.overlap_grad_reduce,
        )
        if any(problem(layout, shape) for shape in models.frozen):
            continue
        ways = [layout]  # whole gradients first: they are faster
        if layout.data * layout.context > 1 and not layout.shard_gradients:
            ways.append(replace(layout, shard_gradients=True))
        for layout in ways:
            size = taken + max(held.total for held in on_trainer(config, models, layout, hardware))
            if size <= hardware.room:
                found.append(Candidate(layout, size, predict(models.policy, layout, work, element).total))
                break
    return found
