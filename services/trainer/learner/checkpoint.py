"""The state of a learner as a sharded Megatron checkpoint, for any arrangement of ranks: taking, writing, loading it.

What is in it: the model, the optimizer's float32 main weights, moments and step, the learning-rate schedule, and each
rank's random generators. Without Transformer Engine or apex, Megatron's distributed optimizer over torch's AdamW has
three traps on the way back; `_fill_optimizer`, `_accept_missing_step` and `_separate_steps` are for one each.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import numpy as np
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from services.trainer.learner.checkpoint_copies import HostCopies
from services.trainer.learner.checkpoint_reader import ReadCommonStrategy, ReadStrategy
from services.trainer.learner.checkpoint_writer import ThreadStrategy
from services.trainer.megatron.disk_work import DiskWork
from services.trainer.megatron.parallel import World
from services.trainer.model.model import PolicyModel

SHARDING = {
    # The optimizer's state in the shapes of the parameters, so that any other arrangement of ranks can load it.
    "distrib_optim_sharding_type": "fully_reshardable",
    # Gathered over gloo on the first data-parallel rank only: no GPU memory, one copy per model on the host.
    "distrib_optim_fully_reshardable_mem_efficient": True,
    "chained_optim_avoid_prefix": True,
}


class CheckpointError(Exception):
    """A checkpoint can't be used; the message says why."""


@dataclass(frozen=True)
class Stateful:
    """What a checkpoint holds of a learner."""

    model: PolicyModel
    """This rank's part of the model."""
    optimizer: MegatronOptimizer
    """Its optimizer."""
    schedule: OptimizerParamScheduler
    """Its learning-rate schedule."""
    world: World
    """Its place."""


class Snapshot:
    """The state as it was when this was made, on its way to the disk. Training may go on meanwhile, but the weights and
    the optimizer's state must not change before `copies` are made."""

    def __init__(self, state: Stateful, folder: Path) -> None:
        """StepPlan the files and begin to copy the state. All ranks make it together; `folder` exists and is empty."""
        self.copies = HostCopies(state.world.device)
        _fill_optimizer(state.optimizer)
        model = state.model.sharded_state_dict(metadata=dict(SHARDING))
        # The optimizer's parts are found by the parameters that the model's point to, so these are replaced only after.
        with self.copies.of_optimizers(_single_optimizers(state.optimizer)):
            optimizer = state.optimizer.sharded_state_dict(model, metadata=dict(SHARDING))
        _make_plain(optimizer)
        for part in nested_values(model):
            if isinstance(getattr(part, "data", None), torch.Tensor):
                part.data = self.copies.of(part.data)
        content = {
            "model": model,
            "optimizer": optimizer,
            "schedule": state.schedule.state_dict(),
            "generators": _generators(state.world, read_generators()),
        }
        self._strategy = strategy = ThreadStrategy(state.world.disk)
        request = dist_checkpointing.save(content, str(folder), sharded_strategy=strategy, async_sharded_save=True)
        assert request is not None
        if not all(self.copies.owns(tensor) for tensor in strategy.tensors):
            raise RuntimeError("Megatron has copied a tensor that nothing was written to yet")
        self._request: AsyncRequest = request
        self.copies.start()

    def write(self) -> None:
        """Write this rank's file and wait until it is on the disk. For a thread beside training.

        Raises:
            Exception: what copying or writing raised, such as OSError.
        """
        self.copies.check()
        assert self._request.async_fn is not None
        self._request.async_fn(*self._request.async_fn_args)

    def finish(self) -> None:
        """Write what describes the files. All ranks call it together, after `write` has ended well on all of them."""
        self._strategy.finish()  # not the request's own functions: their ranks wait for files in collectives


def load_snapshot(state: Stateful, folder: Path, *, same_layout: bool) -> None:
    """Bring a learner to a checkpoint's state. All ranks call it together.

    Args:
        state: what to fill, just made.
        folder: the checkpoint.
        same_layout: whether the ranks are arranged as they were when it was saved: only then do the random generators
            have a place to go to.

    Raises:
        CheckpointError: it doesn't hold what this model needs.
        DiskWorkFailed, DiskStalled: another rank couldn't read its part.
    """
    _fill_optimizer(state.optimizer)
    model = state.model.sharded_state_dict(metadata=dict(SHARDING))
    content: dict[str, Any] = {
        "model": model,
        "optimizer": state.optimizer.sharded_state_dict(model, is_loading=True, metadata=dict(SHARDING)),
    }
    if same_layout:
        content["generators"] = _generators(state.world, None)
    loaded = _load(content, folder, state.world.disk)
    state.model.load_state_dict(loaded["model"])
    _add_classes(loaded["optimizer"], state.optimizer)
    with _accept_missing_step(state.optimizer):
        state.optimizer.load_state_dict(loaded["optimizer"])
    _separate_steps(state.optimizer)
    state.schedule.load_state_dict(loaded["schedule"])
    if same_layout:
        write_generators(loaded["generators"])


def load_model(model: PolicyModel, folder: Path, world: World) -> None:
    """Load the model alone. All ranks call it together.

    Raises:
        CheckpointError: it isn't one of this model.
    """
    loaded = _load({"model": model.sharded_state_dict(metadata=dict(SHARDING))}, folder, world.disk)
    model.load_state_dict(loaded["model"])


def read_generators() -> dict[str, Any]:
    """The states of this process's random generators, as tensors and plain values."""
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
    """Bring this process's random generators to what `read_generators` gave."""
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
    """What `sharded_state_dict` made of each of the `_single_optimizers`."""
    return [state] if "optimizer" in state else [part for _, part in sorted(state.items())]


def _make_plain(state: dict[Any, Any]) -> None:
    """Leave out what has no place in a file."""
    for part in _single_states(state):
        if part["param_state"] is None:  # data-parallel ranks that gather nothing, where the others have tensors
            part["param_state"] = {}
        groups = part["optimizer"]["param_groups"]
        # The offloaded optimizer has classes in there; torch wouldn't load them, and rightly so.
        part["optimizer"]["param_groups"] = [
            {name: value for name, value in group.items() if not isinstance(value, type)} for group in groups
        ]


def _add_classes(state: dict[Any, Any], optimizer: MegatronOptimizer) -> None:
    """Put back the classes that `_make_plain` has left out."""
    for part, one in zip(_single_states(state), _single_optimizers(optimizer), strict=True):
        classes = {name: value for name, value in one.optimizer.defaults.items() if isinstance(value, type)}
        for group in part["optimizer"]["param_groups"]:
            group |= classes


def _fill_optimizer(optimizer: MegatronOptimizer) -> None:
    """Give every parameter the state that AdamW makes at its first step.

    Trap 1: Megatron reads the optimizer's step from the first parameter's state, and what is to be loaded from the
    shapes that are there. Before the first step there is nothing.
    """
    for one in _single_optimizers(optimizer):
        if isinstance(one.optimizer, HybridDeviceOptimizer):  # offloaded: it has an optimizer per parameter
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
    """Let a parameter keep the step that it has where the tensors to be loaded have none.

    Trap 2: Megatron copies every entry of a parameter's state, and torch's AdamW has its step there. Megatron keeps
    that with the groups of parameters and doesn't save it per parameter: KeyError.
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
    """Give every parameter a step of its own.

    Trap 3: Megatron puts one tensor into every parameter's state. Each parameter's update then counts it up, so that
    the next step is not the s-th but the (s + parameters)-th: too little bias correction, and nobody says a word.
    """
    for one in _single_optimizers(optimizer):
        for state in one.optimizer.state.values():
            state["step"] = state["step"].clone()
