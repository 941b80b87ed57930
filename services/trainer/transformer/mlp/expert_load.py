"""Metrics of a step's routing: load per expert, and the routers' own losses."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from services.trainer.megatron.parallel import World
from services.trainer.transformer.mlp.router import Router


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
