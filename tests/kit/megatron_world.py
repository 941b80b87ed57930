"""The end of a Megatron world, so that its processes can create another. Services never do: their ranks end with it."""

import gc

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from services.trainer.megatron import world


def leave_layout() -> None:
    """Destroy the layout and its process groups, so that `initialize` can create another with the same processes.

    All ranks call this. Each gloo group has three threads, one of which wakes up a hundred times a second; they end
    with the group. A learner's reference cycles would keep its 23 groups until Python looks for garbage by itself.
    """
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.barrier()  # until no rank uses a group any more
        for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
            dist.destroy_process_group(group)
    gc.collect()


def shut_down() -> None:
    """Leave the current world, if any, so that this process can initialize another."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    world._store = None
    gc.collect()  # see `leave_layout`
