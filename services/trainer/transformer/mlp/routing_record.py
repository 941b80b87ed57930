"""The record of which experts a forward pass has sent its tokens to, for replaying it in a step's updates."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.row_packing import PackedMicroBatch
from services.trainer.megatron.parallel import World
from services.trainer.transformer.mlp.router import Router


@contextmanager
def recording(routers: Sequence[Router]) -> Iterator[None]:
    """Record what the routers choose in the block: passes without gradients, micro-batch after micro-batch."""
    for router in routers:
        router.recorded = []
    try:
        yield
    finally:
        for router in routers:
            router.recorded = None


def recorded_experts(
    routers: Sequence[Router], micro_batches: Sequence[PackedMicroBatch], world: World
) -> list[NDArray[np.unsignedinteger]]:
    """Return the routers' choices since `recording` began. Collective in a data-parallel replica.

    Args:
        routers: this stage's routers, by layer.
        micro_batches: the micro-batches of the pass.
        world: this rank's place in the world.

    Returns:
        For each micro-batch uint8 or, with more than 256 experts, uint16 [T, layers, top_k], on all ranks.
    """
    # [this rank's tokens of all micro-batches, this stage's layers, top_k]; padding may come after the micro-batches
    own = torch.stack([torch.cat(router.recorded or []) for router in routers], 1)
    counts = world.pipeline_layers or (own.shape[1],) * world.pp_size
    # Padded to the layers of the largest stage: all ranks gather as much.
    own = torch.cat((own, own.new_zeros(len(own), max(counts) - own.shape[1], own.shape[2])), 1)
    groups = (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    everything = own
    for group in groups:  # tensor-parallel ranks have neighbouring parts of a context-parallel rank's slice
        everything = _gather(everything, group)
    stages = everything.view(world.pp_size, world.cp_size * world.tp_size, *own.shape)
    stages_own = [stage[:, :, :count] for stage, count in zip(stages, counts, strict=True)]
    whole = torch.cat(stages_own, 2).cpu().numpy()  # [slices, tokens, all layers, top_k], stage after stage
    if world.pipeline_chunks > 1:
        whole = whole[:, :, np.argsort([layer for stage in world.stage_layers(whole.shape[2]) for layer in stage])]
    whole = whole.view(np.uint16) if whole.dtype == np.int16 else whole
    found, begin, slices = [], 0, len(whole)
    for batch in micro_batches:
        end = begin - (-len(batch.tokens) // slices)
        found.append(whole[:, begin:end].reshape(-1, *whole.shape[2:])[: len(batch.tokens)])
        begin = end
    return found


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensors of a group's ranks, in the order of the ranks, along a new first dimension."""
    if group.size() == 1:
        return tensor.unsqueeze(0)
    parts = torch.empty((group.size(), *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    # As bytes: neither gloo nor NCCL knows int16.
    dist.all_gather(list(parts.view(torch.uint8)), tensor.contiguous().view(torch.uint8), group=group)
    return parts
