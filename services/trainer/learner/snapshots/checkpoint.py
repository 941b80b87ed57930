"""Snapshots of a learner's state as sharded Megatron checkpoints, which any parallel layout can load.

A checkpoint holds the model, the optimizer's float32 main weights, moments and step, the learning-rate schedule, the
same of a critic, the number of updates, and each rank's random generators. Of frozen models it holds those that have
taken over the model's weights. Loading Megatron's distributed optimizer
over torch's AdamW, without Transformer Engine or apex, has three pitfalls, handled by `_fill_optimizer`,
`_accept_missing_step` and `_separate_steps`.
"""

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from services.trainer.learner.compared.frozen_model import FrozenModel
from services.trainer.learner.snapshots.checkpoint_copies import HostCopies, HostMemory
from services.trainer.learner.snapshots.checkpoint_reader import ReadCommonStrategy, ReadStrategy
from services.trainer.learner.snapshots.checkpoint_writer import FilePlan, SnapshotFiles, serialized
from services.trainer.megatron.disk_work import DiskWork
from services.trainer.megatron.parallel import World
from services.trainer.megatron.rank_channel import all_ranks_agree
from services.trainer.model.model import PolicyModel

SHARDING = {
    # Optimizer state in the parameters' shapes, so that any other layout can load it.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gather over gloo to the first data-parallel rank only: no GPU memory, one copy per model on the host.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


CRITIC = "critic"
"""Name of the critic's part."""


class CheckpointError(Exception):
    """A checkpoint doesn't fit the model or the trainer."""


@dataclass(frozen=True)
class TrainedModel:
    """A model that is trained."""

    model: PolicyModel
    """This rank's part of the model."""
    optimizer: MegatronOptimizer
    """The optimizer."""
    schedule: OptimizerParamScheduler
    """The learning-rate schedule."""


@dataclass(frozen=True)
class Stateful:
    """The parts of a learner that a checkpoint holds."""

    policy: TrainedModel
    """The policy; the critic, of a critic service."""
    critic: TrainedModel | None
    """The critic, if the algorithm has one."""
    frozen: Mapping[str, FrozenModel]
    """The frozen models of the trainer's ranks, by role."""
    step: int
    """Number of the step whose weights these are."""
    world: World
    """This rank's place in the world."""
    optimizer_steps: int
    """Number of updates that have changed the weights."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The numbers of the last step, where nothing else keeps them."""
    skipped_in_a_row: int = 0
    """Updates skipped in a row, where nothing else counts them."""


@dataclass(frozen=True)
class Loaded:
    """The state of a learner outside its model, as read from a checkpoint."""

    optimizer_steps: int
    """As of `Stateful`."""
    metrics: dict[str, float]
    """As of `Stateful`."""
    skipped_in_a_row: int
    """As of `Stateful`."""


class Checkpointed(Protocol):
    """A learner that can be checkpointed: the policy's or the critic's."""

    world: World
    """This rank's place in the world."""

    def checksum(self) -> int:
        """Return the `bit_sum` of this rank's weights."""

    def snapshot(self, folder: Path) -> "Snapshot":
        """Start a snapshot of the state, to be written to an empty folder. All ranks call it together."""

    def restore(self, folder: Path, step: int, *, same_layout: bool) -> None:
        """Load the snapshot of a step. All ranks call it together. Raises CheckpointError: it doesn't fit."""


class Kept:
    """The host's memory and the plan of the files, which a learner keeps from one snapshot for the next."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.plan: FilePlan | None = None
        self.parts: set[str] = set()
        """The names of what it saved, such as the policy's and a frozen model's."""
        self.in_use = False
        """Whether a snapshot isn't written yet."""

    def free_or_new(self) -> "Kept":
        """Return this one unless it is in use, as after a snapshot that was abandoned because it took too long."""
        return Kept() if self.in_use else self


class Snapshot:
    """The state at construction, being written to disk.

    Training may continue meanwhile, but weights and optimizer state must not change before `copies` are complete.
    """

    def __init__(self, state: Stateful, folder: Path, kept: Kept) -> None:
        """Plan the files and start copying the state. All ranks create it together; `folder` exists and is empty."""
        self._kept = kept
        kept.in_use = True
        self.copies = HostCopies(state.world.device, kept.memory)
        content = {
            **self._content(state.policy),
            "optimizer_steps": state.optimizer_steps,
            "metrics": dict(state.metrics),
            "skipped_in_a_row": state.skipped_in_a_row,
            "generators": _generators(state.world, read_generators()),
        }
        if state.critic is not None:
            content[CRITIC] = self._content(state.critic)
            add_prefix_for_sharding(content[CRITIC], f"{CRITIC}.")
            content[CRITIC]["step"] = state.step
        for role, model in state.frozen.items():
            if model.refreshed:
                content[role] = {
                    "model": self._copy(model.module.sharded_state_dict(metadata=dict(SHARDING))),
                    "step": state.step,
                }
                add_prefix_for_sharding(content[role], f"{role}.")
        parts = set(content)
        again = all_ranks_agree(kept.plan is not None and kept.parts == parts, device=state.world.device)
        # `dist_checkpointing.save` would write common.pt here, where a full disk would end training.
        # Megatron validates that exactly one copy of each parameter is saved among all ranks: once is enough.
        sharded, common = save_preprocess(content, validate_access_integrity=not again)
        self._common = serialized(common).getvalue() if state.world.rank == 0 else b""
        self._folder = folder
        self._files = SnapshotFiles(sharded, folder, state.world, kept.plan if again else None)
        kept.plan, kept.parts = self._files.plan, parts
        tensors = self._files.tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors) + len(self._common)
        """Bytes that this rank writes, but for a few."""
        if not all(self.copies.owns(tensor) for tensor in tensors):
            raise RuntimeError("Megatron has copied a tensor before it was filled")
        self.copies.start()

    def _content(self, state: TrainedModel) -> dict[str, Any]:
        _fill_optimizer(state.optimizer)
        model = state.model.sharded_state_dict(metadata=dict(SHARDING))
        # The optimizer's shards refer to the model's parameters, so replace those only afterwards.
        with self.copies.of_optimizers(_single_optimizers(state.optimizer)):
            optimizer = state.optimizer.sharded_state_dict(model, metadata=dict(SHARDING))
        _make_plain(optimizer)
        self._copy(model)
        return {"model": model, "optimizer": optimizer, "schedule": state.schedule.state_dict()}

    def _copy(self, model: dict[str, Any]) -> dict[str, Any]:
        """Replace the parameters of a model's sharded state by copies."""
        for part in nested_values(model):
            if isinstance(getattr(part, "data", None), torch.Tensor):
                part.data = self.copies.of(part.data)
        return model

    def write(self) -> None:
        """Write this rank's file and wait until it is on disk. Runs in a thread beside training.

        Raises:
            Exception: copying or writing failed, for example with OSError.
        """
        try:
            self.copies.check()
            if self._common:
                (self._folder / COMMON_STATE_FNAME).write_bytes(self._common)
            self._files.write()
        finally:
            self._kept.in_use = False

    def give_up(self) -> None:
        """Leave it unwritten. Waits for the copies, as the next snapshot needs their memory. Raises as `write`."""
        try:
            self.copies.check()
        finally:
            self._kept.in_use = False

    def finish(self) -> str:
        """Write the metadata; see `SnapshotFiles.finish`. All ranks call it, after `write` has succeeded on all."""
        return self._files.finish()


def load_snapshot(state: Stateful, folder: Path, *, same_layout: bool) -> Loaded:
    """Load a checkpoint into a learner. All ranks call it together.

    Args:
        state: the newly built learner's state; its step is the one that the checkpoint must be of.
        folder: the checkpoint.
        same_layout: whether the parallel layout is the same as when it was saved. Only then are the random generators
            restored.

    Raises:
        CheckpointError: it doesn't fit this model, or has no critic of this step.
        DiskWorkFailed, DiskStalled: another rank couldn't read its part.
    """
    content = _to_load(state.policy)
    if state.critic is not None:
        _check_critic(state, folder)
        content[CRITIC] = _to_load(state.critic)
        add_prefix_for_sharding(content[CRITIC], f"{CRITIC}.")
    common = ReadCommonStrategy(state.world.disk).load_common(folder) if state.frozen else {}
    refreshed = {role: model for role, model in state.frozen.items() if role in common}
    for role, model in refreshed.items():
        content[role] = {"model": model.module.sharded_state_dict(metadata=dict(SHARDING))}
        add_prefix_for_sharding(content[role], f"{role}.")
    if same_layout:
        content["generators"] = _generators(state.world, None)
    loaded = _load(content, folder, state.world.disk)
    _set(state.policy, loaded)
    if state.critic is not None:
        _set(state.critic, loaded[CRITIC])
    for role, model in refreshed.items():
        model.module.load_state_dict(loaded[role]["model"])
        model.refreshed = True
    if same_layout:
        write_generators(loaded["generators"])
    # Checkpoints of earlier releases have none of these; their steps had one update.
    steps = int(loaded.get("optimizer_steps", state.policy.schedule.num_steps))
    return Loaded(steps, dict(loaded.get("metrics", {})), int(loaded.get("skipped_in_a_row", 0)))


def _check_critic(state: Stateful, folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint has a critic, and of the policy's step."""
    found = ReadCommonStrategy(state.world.disk).load_common(folder).get(CRITIC)
    if found is None:
        raise CheckpointError(
            f"{folder} has no critic, which this run's algorithm trains together with the policy: it is of a run "
            "without one. Export it, and start a run from the exported model"
        )
    if found["step"] != state.step:
        raise CheckpointError(
            f"{folder} has the policy of step {state.step}, but the critic of step {found['step']}: they must be of "
            "the same"
        )


def _to_load(state: TrainedModel) -> dict[str, Any]:
    _fill_optimizer(state.optimizer)
    model = state.model.sharded_state_dict(metadata=dict(SHARDING))
    optimizer = state.optimizer.sharded_state_dict(model, is_loading=True, metadata=dict(SHARDING))
    return {"model": model, "optimizer": optimizer}


def _set(state: TrainedModel, loaded: dict[str, Any]) -> None:
    state.model.load_state_dict(loaded["model"])
    _add_classes(loaded["optimizer"], state.optimizer)
    with _accept_missing_step(state.optimizer):
        state.optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(state.optimizer)
    state.schedule.num_steps = 0  # Megatron adds the checkpoint's steps to those that the schedule has
    state.schedule.load_state_dict(loaded["schedule"])


def load_model(model: PolicyModel, folder: Path, world: World) -> None:
    """Load only the model. All ranks call it together.

    Raises:
        CheckpointError: it doesn't fit this model.
    """
    loaded = _load({"model": model.sharded_state_dict(metadata=dict(SHARDING))}, folder, world.disk)
    model.load_state_dict(loaded["model"])


def read_generators() -> dict[str, Any]:
    """Return the states of this process's random generators, as tensors and plain values."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: states.cpu() for name, states in get_cuda_rng_tracker().get_states().items()},
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
    }


def write_generators(states: dict[str, Any]) -> None:
    """Restore the states that `read_generators` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(dict(states["megatron"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _load(content: dict[str, Any], folder: Path, disk: DiskWork) -> dict[str, Any]:
    strategies = {"sharded_strategy": ReadStrategy(disk), "common_strategy": ReadCommonStrategy(disk)}
    try:
        return dict(dist_checkpointing.load(content, str(folder), **strategies))
    except CheckpointException as error:
        reasons = {str(failure) or type(failure).__name__ for failure, _ in error.failures.values()}
        raise CheckpointError(f"{folder} doesn't fit this model and trainer: {'; '.join(sorted(reasons))}") from error


def _generators(world: World, states: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("generators", states, (world.size,), (world.rank,), replica_id=0)


def _single_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def _single_states(state: dict[Any, Any]) -> list[dict[str, Any]]:
    """Return the part of `sharded_state_dict` of each of the `_single_optimizers`."""
    return [state] if "optimizer" in state else [part for _, part in sorted(state.items())]


def _make_plain(state: dict[Any, Any]) -> None:
    """Remove values that can't be saved."""
    for part in _single_states(state):
        if part["param_state"] is None:  # data-parallel ranks that gather nothing
            part["param_state"] = {}
        groups = part["optimizer"]["param_groups"]
        # The offloaded optimizer keeps classes here, which torch refuses to load.
        part["optimizer"]["param_groups"] = [
            {name: value for name, value in group.items() if not isinstance(value, type)} for group in groups
        ]


def _add_classes(state: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Restore the classes that `_make_plain` removed."""
    for part, one in zip(_single_states(state), _single_optimizers(optimizer), strict=True):
        classes = {name: value for name, value in one.optimizer.defaults.items() if isinstance(value, type)}
        for group in part["optimizer"]["param_groups"]:
            group |= classes


def _fill_optimizer(optimizer: MegatronOptimizer) -> None:
    """Create the state that AdamW creates at its first step, for every parameter.

    Pitfall 1: Megatron takes the optimizer's step and the shapes to load from the existing state, which is empty before
    the first step.
    """
    for one in _single_optimizers(optimizer):
        if isinstance(one.optimizer, HybridDeviceOptimizer):  # offloaded: one optimizer per parameter
            for part in one.optimizer.sub_optimizers:
                _fill(part)
            one.optimizer._sync_sub_optimizers_state_to_hdo()
        else:
            _fill(one.optimizer)


def _fill(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                device = parameter.device if group["fused"] else None
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                    "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }


@contextlib.contextmanager
def _accept_missing_step(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep a parameter's current step if the loaded state has none.

    Pitfall 2: Megatron copies every entry of a parameter's state, which for torch's AdamW includes the step. But
    Megatron saves the step only with the parameter groups, so copying raises KeyError.
    """
    singles = _single_optimizers(optimizer)
    for one in singles:

        def fill(parameter: Any, tensors: dict[str, Any], one: Any = one) -> None:
            have = one._get_main_param_and_optimizer_states(parameter)
            type(one)._set_main_param_and_optimizer_states(one, parameter, {"step": have.get("step"), **tensors})

        one._set_main_param_and_optimizer_states = fill
    try:
        yield
    finally:
        for one in singles:
            del one._set_main_param_and_optimizer_states


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Give every parameter its own step tensor.

    Pitfall 3: Megatron shares one tensor among all parameters' states. Each parameter's update increments it, so the
    next step counts as number s + parameters instead of s, and AdamW silently corrects too little bias.
    """
    for one in _single_optimizers(optimizer):
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()
