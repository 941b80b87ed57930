"""Sums: of what micro-batches report, over those of a step and over ranks; of the weights' bits."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learner.learner import mismatch
from services.trainer.megatron.parallel import World


def add(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Two of what is reported under a name as one: sums, and "mismatch", a measure."""
    return mismatch.merge(one, other) if name == "mismatch" else one + other


def total(sums: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """What all ranks have, those of one model counted once. All ranks call it together, and all get it, on the host."""
    everyone: list[dict[str, Tensor]] = [{}] * world.size
    counts = world.last_stage and world.tensor_rank == 0
    dist.all_gather_object(everyone, {name: value.cpu() for name, value in sums.items()} if counts else {})
    totals: dict[str, Tensor] = {}
    for one in everyone:
        for name, value in one.items():
            totals[name] = add(name, totals[name], value) if name in totals else value
    return totals


def bits(tensors: Iterable[Tensor], device: torch.device) -> int:
    """The sum of the tensors' bits, as signed integers of their elements' size, modulo 2^48."""
    words = {2: torch.int16, 4: torch.int32}
    found = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        found += tensor.detach().view(words[tensor.element_size()]).sum(dtype=torch.int64)
    return int(found) % (1 << 48)
