"""The record of a step's routing: the experts of its tokens, for replay in updates, and metrics of the load."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.batch.micro_batch import PackedMicroBatch
from services.trainer.megatron.world import World
from services.trainer.transformer.mlp.router import Router


@contextmanager
def recording(routers: Sequence[Router]) -> Iterator[None]:
    """Record the routers' choices in the block: passes without gradients, micro-batch after micro-batch."""
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


def reset(routers: Sequence[Router]) -> None:
    """Reset the counters."""
    for router in routers:
        router.load.zero_()
        router.losses.zero_()
        router.replaced.zero_()


def metrics(routers: Sequence[Router], world: World, *, with_losses: bool) -> dict[str, float]:
    """Return the step's metrics from the routers' counters, on all ranks. All ranks call it together.

    Args:
        routers: this stage's routers, at least one.
        world: this rank's place in the world.
        with_losses: True if the routers have losses.

    Returns:
        expert_load_max: tokens of the fullest expert relative to the mean, in the layer with the largest ratio.
        expert_load_mean: the same ratio, averaged over layers.
        expert_load_empty: share of the experts without tokens.
        expert_dropped: share of the tokens dropped for lack of capacity: always 0.
        expert_replaced: share of the choices that were replayed and that the routers would have made differently; with
            routing replay only.
        expert_balance_loss, expert_z_loss: the losses without their coefficients, averaged over layers.
    """
    layers = sum(world.pipeline_layers) or len(routers) * world.pp_size
    own = world.layers_of(layers)
    counts = torch.zeros(layers, len(routers[0].load), dtype=torch.float64, device=world.device)
    sums = torch.zeros(layers, 4, dtype=torch.float64, device=world.device)
    counts[own] = torch.stack([router.load for router in routers]).double()
    sums[own, :3] = torch.stack([router.losses for router in routers]).double()
    sums[own, 3] = torch.stack([router.replaced for router in routers]).double()
    everything = torch.cat((counts, sums), 1)
    if world.size > 1:
        dist.all_reduce(everything)
    everything = everything.cpu()
    counts, losses, replaced = everything[:, :-4], everything[:, -4:-1], everything[:, -1]
    fullest = counts.amax(1) / counts.mean(1).clamp(min=1e-9)
    found = {
        "expert_load_max": float(fullest.max()),
        "expert_load_mean": float(fullest.mean()),
        "expert_load_empty": float((counts == 0).double().mean()),
        "expert_dropped": 0.0,
    }
    if routers[0].replays:
        found["expert_replaced"] = float(replaced.sum() / counts.sum().clamp(min=1.0))
    if with_losses:
        averages = losses[:, :2] / losses[:, 2:].clamp(min=1e-9)
        found |= {"expert_balance_loss": float(averages[:, 0].mean()), "expert_z_loss": float(averages[:, 1].mean())}
    return found
