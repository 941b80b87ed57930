"""Parameters that are not trained: `trainer.freeze` and `trainer.train_only`."""

import re
from collections import defaultdict

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch

from relaxd.config import TrainerConfig
from relaxd.config.trainer import PARTS
from services.trainer.megatron.world import World
from services.trainer.model.architecture import Architecture, ModelError
from services.trainer.model.parameter_entries import entries


def freeze(model: torch.nn.Module, shape: Architecture, world: World, config: TrainerConfig) -> None:
    """Exclude the parameters from training that the settings exclude. Call it before `DataParallel`.

    All ranks look at the whole model, so that they raise the same error.

    Raises:
        ModelError: a pattern is found in no name, tensors in one parameter differ, or a pipeline stage has nothing to
            train.
    """
    setting = "train_only" if config.train_only else "freeze"
    patterns = [pattern for pattern in config.train_only or config.freeze if pattern not in PARTS]
    names: list[str] = []
    for stage in range(world.pp_size):
        tensors: defaultdict[str, list[str]] = defaultdict(list)
        for entry in entries(shape, stage, world.pp_size, world.ep_size, world.pipeline_layers, world.pipeline_chunks):
            tensors[entry.megatron] += [part.name for parts in entry.parts for part in parts]
        trained = {}
        for parameter, own in tensors.items():
            names += own
            by_fate = {config.trains(name): name for name in own}
            if len(by_fate) > 1:
                raise ModelError(
                    f"trainer.{setting} trains {by_fate[True]} but not {by_fate[False]}, which are one parameter in "
                    "the trainer: name both or none"
                )
            trained[parameter] = True in by_fate
        if not any(trained.values()):
            raise ModelError(
                f"trainer.{setting} leaves nothing to train in pipeline stage {stage}: choose fewer tensors to freeze, "
                "or fewer stages"
            )
        if stage == world.pp_rank:
            for name, weight in model.named_parameters():
                weight.requires_grad_(trained[name])
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            raise ModelError(f"trainer.{setting} has {pattern!r}, which is found in no name: they are like {names[-1]}")
