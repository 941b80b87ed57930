"""The Megatron world: process groups with deadlines, parallel sizes, seeds."""

import itertools
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from relaxd.config import TrainerConfig
from relaxd.weights.group import host_store
from services.trainer.megatron.disk_work import DiskWork

_store: dist.Store | None = None
"""The rendezvous of this world's processes."""
_worlds = itertools.count()
"""Numbers the worlds of this process, which all ranks make in the same order."""


@dataclass(frozen=True)
class GatherGroups:
    """Process groups on which weights are gathered.

    Only the first data-parallel replica gathers; its ranks with tensor rank 0 are the sources, one per pipeline stage.
    """

    source: bool
    """Whether this rank ends up with its stage's full tensors."""
    dense: dist.ProcessGroup | None
    """The tensor-parallel ranks that gather dense tensors; None where this rank isn't one of them."""
    experts: dist.ProcessGroup | None
    """The tensor- and expert-parallel ranks that gather experts; None where this rank isn't one of them."""


@dataclass(frozen=True)
class World:
    """This process's place in the Megatron world."""

    rank: int
    """Global rank."""
    size: int
    """Processes."""
    device: torch.device
    """Where this rank computes."""
    tensor_rank: int
    """Rank among those that share each matrix."""
    tensor_size: int
    """Ranks that share each matrix."""
    stage: int
    """Pipeline stage."""
    stages: int
    """Pipeline stages."""
    context_rank: int
    """Rank among those that share each micro-batch's tokens."""
    context_size: int
    """Ranks that share each micro-batch's tokens."""
    expert_rank: int
    """Rank among those that share the experts."""
    expert_size: int
    """Ranks that share the experts."""
    expert_tensor_rank: int
    """Rank among those that share each expert's matrices."""
    expert_tensor_size: int
    """Ranks that share each expert's matrices."""
    data_rank: int
    """Rank among those that work on different groups."""
    data_size: int
    """Ranks that work on different groups."""
    gather: GatherGroups
    """Groups for gathering weights in a thread beside training, which runs collectives of its own meanwhile."""
    gather_in_training: GatherGroups
    """Groups of the same ranks for gathering weights in the training thread."""
    disk: DiskWork
    """Has ranks wait for each other's work on disks."""

    @property
    def first_stage(self) -> bool:
        """Whether this rank has the embedding."""
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        """Whether this rank computes log-probs and the loss."""
        return self.stage == self.stages - 1


def initialize(config: TrainerConfig, seed: int) -> World:
    """Join the process group (from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as torchrun sets them) and lay it out.

    Every group has `collective_timeout_seconds` as its deadline, which counts once all ranks have come: they load their
    code, and fetch the model, from disks. gloo without CUDA, nccl with it. Without RANK in the environment the world is
    this process alone.

    Args:
        config: parallel sizes, threads and the deadline.
        seed: seeds torch and Megatron's generators.

    Raises:
        ValueError: the number of processes isn't `config.ranks`.
    """
    global _store
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    cuda = torch.cuda.is_available()
    if config.tensor_parallel > 1:
        # One hardware queue: communication that is launched first also starts first, beside the products that follow.
        # CUDA reads this when it starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not dist.is_initialized():
        if "RANK" in os.environ:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        else:
            rank, size = 0, 1
        if size != config.ranks:
            raise ValueError(f"WORLD_SIZE is {size}, but trainer.ranks is {config.ranks}: they must be the same")
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        _store = _meeting_place(rank, config.disk_stall_seconds) if size > 1 else dist.HashStore()
        disk = _disk_work(_store, rank, size, config)
        with disk.together("starting"):
            pass
        _store.set_timeout(timeout)
        dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size, store=_store, timeout=timeout)
    else:
        assert _store is not None
        disk = _disk_work(_store, dist.get_rank(), dist.get_world_size(), config)
    if not cuda:
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // config.ranks))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=expert_tensor_parallel(config),
        distributed_timeout_minutes=config.collective_timeout_seconds / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    gather = _gather_groups(timeout)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        gather=gather,
        gather_in_training=_training_groups(gather),
        disk=disk,
    )


def _meeting_place(rank: int, seconds: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's, else one of rank 0's that listens on that address only."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return host_store(host, port, seconds)
    return dist.TCPStore(host, port, None, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False)


def _disk_work(store: dist.Store, rank: int, size: int, config: TrainerConfig) -> DiskWork:
    # A connection of its own: on the store's, a thread that waits for a key keeps all others off.
    own: Any = store.clone() if isinstance(store, dist.TCPStore) else store  # type: ignore[attr-defined]
    return DiskWork(dist.PrefixStore(f"disk/{next(_worlds)}", own), rank, size, config.disk_stall_seconds)


def expert_tensor_parallel(config: TrainerConfig) -> int:
    """Ranks that share each expert's matrices: either whole experts are divided among ranks, or each one is cut.

    Megatron counts experts as ordinary parameters where nobody shares them whole, and so wouldn't add up the gradients
    of experts that tensor-parallel ranks have uncut.
    """
    return config.tensor_parallel if config.expert_parallel == 1 else 1


def leave_layout() -> None:
    """Forget how the processes are divided, so that `initialize` can divide them anew."""
    parallel_state.destroy_model_parallel()


def shut_down() -> None:
    """Leave the world, so that another can be initialized in this process."""
    global _store
    leave_layout()
    if dist.is_initialized():
        dist.destroy_process_group()
    _store = None


def _gather_groups(timeout: timedelta) -> GatherGroups:
    """Make the groups. Every rank makes every group, in the same order, as torch demands."""
    source = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    mine = (
        source,
        dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
        dist.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group()),
    )
    everyone: list[tuple[bool, list[int], list[int]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rank = dist.get_rank()
    dense = experts = None
    for is_source, dense_ranks, expert_ranks in everyone:
        if not is_source:
            continue
        dense_group = dist.new_group(dense_ranks, timeout=timeout)
        expert_group = dist.new_group(expert_ranks, timeout=timeout)
        dense = dense_group if rank in dense_ranks else dense
        experts = expert_group if rank in expert_ranks else experts
    return GatherGroups(source, dense, experts)


def _training_groups(gather: GatherGroups) -> GatherGroups:
    """The training thread's own groups of the ranks that gather."""
    return replace(
        gather,
        dense=None if gather.dense is None else parallel_state.get_tensor_model_parallel_group(),
        experts=None if gather.experts is None else parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
