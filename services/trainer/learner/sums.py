"""Sums of the values that micro-batches report, over a step and over ranks; checksum of tensors."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learner import mismatch
from services.trainer.megatron.parallel import World


def merge_reported(name: str, one: Tensor, other: Tensor) -> Tensor:
    """Merge two values reported under a name: the measure "mismatch", or sums."""
    return mismatch.merge_measures(one, other) if name == "mismatch" else one + other


def reduce_over_ranks(sums: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Add up the values of all data- and context-parallel ranks, on CPU. All ranks call it together."""
    by_rank: list[dict[str, Tensor]] = [{}] * world.size
    contributes = world.last_stage and world.tp_rank == 0  # the tensor-parallel ranks have the same values
    dist.all_gather_object(by_rank, {name: value.cpu() for name, value in sums.items()} if contributes else {})
    totals: dict[str, Tensor] = {}
    for one in by_rank:
        for name, value in one.items():
            totals[name] = merge_reported(name, totals[name], value) if name in totals else value
    return totals


def bit_sum(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Sum the elements' bits as signed integers, modulo 2^48."""
    words = {2: torch.int16, 4: torch.int32}
    found = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        found += tensor.detach().view(words[tensor.element_size()]).sum(dtype=torch.int64)
    return int(found) % (1 << 48)
