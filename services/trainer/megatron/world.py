"""The Megatron world: process groups with deadlines, parallel ranks and sizes, seeds.

Dimensions have Megatron's short names: tp (tensor), pp (pipeline), cp (context), ep (expert), dp (data), and etp for
the tensor parallelism of experts.
"""

import itertools
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from relaxd.config import TrainerConfig
from relaxd.models.layouts import Layout, chunk_layers
from relaxd.weights.weight_group import host_store
from services.trainer.megatron import ATTEMPT_VARIABLE
from services.trainer.megatron.channels import all_gather
from services.trainer.megatron.disk_work import DiskWork

_store: dist.Store | None = None
"""The rendezvous store of this world's processes."""
_worlds = itertools.count()
"""Numbers the worlds that this process creates. All ranks create them in the same order."""


@dataclass(frozen=True)
class GatherGroups:
    """Process groups for gathering weights.

    Only the first data-parallel replica gathers. Its ranks with tp_rank 0 are the sources, one per pipeline stage.
    """

    source: bool
    """True if this rank receives the full weights of its pipeline stage."""
    dense: dist.ProcessGroup | None
    """Tensor-parallel ranks among which dense weights are gathered; None on other ranks."""
    experts: dist.ProcessGroup | None
    """Tensor- and expert-parallel ranks among which experts' weights are gathered; None on other ranks."""


@dataclass(frozen=True)
class World:
    """This process's ranks, group sizes and process groups in the Megatron world."""

    rank: int
    """Number of this rank in the world, from 0."""
    size: int
    """Number of ranks in the world."""
    layout: Layout
    """Division of the model among the ranks."""
    device: torch.device
    """Device on which this rank computes: a GPU or the CPU."""
    tp_rank: int
    """Tensor-parallel rank: its index among the ranks that share each matrix."""
    tp_size: int
    """Number of tensor-parallel ranks, which share each matrix."""
    pp_rank: int
    """Number of this rank's pipeline stage, from 0."""
    pp_size: int
    """Number of pipeline stages."""
    cp_rank: int
    """Context-parallel rank: its index among the ranks that share each micro-batch's tokens."""
    cp_size: int
    """Number of context-parallel ranks, which share each micro-batch's tokens."""
    ep_rank: int
    """Expert-parallel rank: its index among the ranks that share the experts."""
    ep_size: int
    """Number of expert-parallel ranks, which share the experts."""
    etp_rank: int
    """Expert-tensor-parallel rank: its index among the ranks that share each expert's matrices."""
    etp_size: int
    """Number of expert-tensor-parallel ranks, which share each expert's matrices."""
    dp_rank: int
    """Data-parallel rank: its index among the ranks that train on different groups."""
    dp_size: int
    """Number of data-parallel ranks, which train on different groups."""
    gather: GatherGroups
    """Process groups for gathering weights in a thread beside training, separate from training's own."""
    gather_in_training: GatherGroups
    """Process groups for gathering weights in the training thread: training's own, of the same ranks."""
    disk: DiskWork
    """Coordinates disk work with the other ranks."""

    def stage_layers(self, layers: int) -> list[list[int]]:
        """Return the layer numbers of each pipeline stage, chunk after chunk, for a model of `layers` layers."""
        layout = self.layout
        stages = chunk_layers(layers, self.pp_size, layout.pipeline_layers, layout.pipeline_chunks)
        return [[layer for chunk in chunks for layer in chunk] for chunks in stages]

    def layers_of(self, layers: int) -> list[int]:
        """Return the layer numbers of this pipeline stage, chunk after chunk, for a model of `layers` layers."""
        return self.stage_layers(layers)[self.pp_rank]

    @property
    def first_stage(self) -> bool:
        """True if this rank is in the first pipeline stage, which has the embedding."""
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        """True if this rank is in the last pipeline stage, which computes log-probs and the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def first_of_replica(self) -> bool:
        """True on the first rank of each data-parallel replica. All ranks of a replica get the same results."""
        return self.tp_rank == self.cp_rank == self.pp_rank == 0


def initialize(config: TrainerConfig, seed: int) -> World:
    """Join the process group and create the parallel layout.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment, as torchrun sets them.
    Every group has the deadline `collective_timeout_seconds`, which applies once all ranks have joined; before, they
    load code and model from disk. The backend is nccl with CUDA, otherwise gloo. Without RANK in the environment the
    world is this process alone.

    Args:
        config: parallel sizes, threads and the deadline.
        seed: seeds torch and Megatron's generators.

    Raises:
        ValueError: the number of processes isn't `config.ranks`.
    """
    global _store
    timeout = timedelta(seconds=config.collective_timeout_seconds)
    cuda, layout = torch.cuda.is_available(), Layout.of_trainer(config)
    if config.tensor_parallel > 1:
        # With one hardware queue, communication that is launched first also starts first and overlaps the products
        # after it. CUDA reads this when it starts.
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
        _store = _rendezvous_store(rank, config.disk_stall_seconds) if size > 1 else dist.HashStore()
        disk = _disk_work(_store, rank, size, config)
        with disk.all_ranks("starting"):
            pass
        _store.set_timeout(timeout)
        dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size, store=_store, timeout=timeout)
    else:
        assert _store is not None
        disk = _disk_work(_store, dist.get_rank(), dist.get_world_size(), config)
    if not cuda:
        torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // config.ranks_per_host))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        context_parallel_size=config.context_parallel,
        expert_model_parallel_size=config.expert_parallel,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=config.collective_timeout_seconds / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    gather = _gather_groups(timeout)
    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        layout=layout,
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        tp_size=parallel_state.get_tensor_model_parallel_world_size(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pp_size=parallel_state.get_pipeline_model_parallel_world_size(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        cp_size=parallel_state.get_context_parallel_world_size(),
        ep_rank=parallel_state.get_expert_model_parallel_rank(),
        ep_size=parallel_state.get_expert_model_parallel_world_size(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        etp_size=parallel_state.get_expert_tensor_parallel_world_size(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        gather=gather,
        gather_in_training=_training_groups(gather),
        disk=disk,
    )


def _rendezvous_store(rank: int, seconds: float) -> dist.Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. Rank 0 hosts it, on that address only, unless torchrun does.

    With ranks on several hosts, each start has its own keys, so ranks left from an earlier start do no harm.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = host_store(host, port, seconds)
    else:
        store = dist.TCPStore(
            host, port, None, is_master=False, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    attempt = os.environ.get(ATTEMPT_VARIABLE)
    return store if attempt is None else dist.PrefixStore(f"attempt/{attempt}", store)


def _disk_work(store: dist.Store, rank: int, size: int, config: TrainerConfig) -> DiskWork:
    # A separate connection: a thread that waits for a key blocks all others on its connection.
    connection: Any = store if isinstance(store, dist.HashStore) else store.clone()  # type: ignore[attr-defined]
    return DiskWork(dist.PrefixStore(f"disk/{next(_worlds)}", connection), rank, size, config.disk_stall_seconds)


def _gather_groups(timeout: timedelta) -> GatherGroups:
    """Create the process groups for gathering weights. torch requires all groups on all ranks, in the same order."""
    source = (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    mine = (
        source,
        dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
        dist.get_process_group_ranks(parallel_state.get_expert_tensor_and_model_parallel_group()),
    )
    all_ranks: list[tuple[bool, list[int], list[int]]] = all_gather(mine)
    rank = dist.get_rank()
    dense = experts = None
    for is_source, dense_ranks, expert_ranks in all_ranks:
        if not is_source:
            continue
        dense_group = dist.new_group(dense_ranks, timeout=timeout)
        expert_group = dist.new_group(expert_ranks, timeout=timeout)
        dense = dense_group if rank in dense_ranks else dense
        experts = expert_group if rank in expert_ranks else experts
    return GatherGroups(source, dense, experts)


def _training_groups(gather: GatherGroups) -> GatherGroups:
    """Return training's own process groups of the same ranks, to gather weights in the training thread."""
    return replace(
        gather,
        dense=None if gather.dense is None else parallel_state.get_tensor_model_parallel_group(),
        experts=None if gather.experts is None else parallel_state.get_expert_tensor_and_model_parallel_group(),
    )
