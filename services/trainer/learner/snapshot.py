"""Snapshots of a learner's state as sharded checkpoints, which any parallel layout can load.

    common.json                            rank 0's: settings and steps of the optimizers, schedules, counters
    rank-00000-0.safetensors ...           each rank's part: see `checkpoint_files`

A checkpoint holds, for the policy and a critic, the float32 main weights, the optimizer's moments and step, and the
learning-rate schedule; further the number of updates and each rank's random generators. It includes frozen models only
if they have adopted the policy's weights. Each rank copies, writes, hashes and reads only its own part.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import random

import numpy as np
import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from services.trainer.batch.disk_files import sync
from services.trainer.learner.checkpoint_files import (
    CheckpointError,
    HostCopies,
    HostMemory,
    Loading,
    PartFile,
    PartFiles,
    Stored,
    Wanted,
    part_name,
)
from services.trainer.learner.checkpoint_pieces import (
    WEIGHTS,
    Boxes,
    Pieces,
    boxes_of,
    trained_pieces,
    untrained_pieces,
    weight_pieces,
)
from services.trainer.learner.frozen_model import FrozenModel
from services.trainer.learner.optimizer import (
    fill,
    read_groups,
    reset_moments,
    single_optimizers,
    use_loaded,
    write_groups,
)
from services.trainer.megatron.disk_work import DiskWork
from services.trainer.megatron.world import World
from services.trainer.model.policy_model import StageModel

COMMON = "common.json"
"""Name of a checkpoint's file with the state that all ranks share."""
POLICY = "policy"
"""Name of the policy in checkpoints; in a critic service's checkpoints, of the critic."""
CRITIC = "critic"
"""Name of the critic in the trainer's checkpoints."""


@dataclass(frozen=True)
class TrainedModel:
    """Trained model with its optimizer and schedule, as checkpoints hold it."""

    model: StageModel
    """This rank's part of the trained model."""
    optimizer: MegatronOptimizer
    """Optimizer of the model."""
    schedule: OptimizerParamScheduler
    """Learning-rate schedule of the model."""


@dataclass(frozen=True, kw_only=True)
class Stateful:
    """State of a learner that a checkpoint holds."""

    policy: TrainedModel
    """Policy with its optimizer; in a critic service, the critic."""
    critic: TrainedModel | None
    """Critic that the trainer's ranks train; None if there is none."""
    frozen: Mapping[str, FrozenModel]
    """Frozen models in the trainer's ranks, by role."""
    step: int
    """Number of the last completed step."""
    world: World
    """Megatron world, with this rank's place in it."""
    optimizer_steps: int
    """Number of updates since the run's beginning that changed the weights."""
    moments: bool = True
    """True if checkpoints include the optimizers' moments."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step, in a critic service; empty in a trainer (see its ledger)."""
    skipped_in_a_row: int = 0
    """Number of updates skipped since the last applied one, in a critic service; 0 in a trainer (see its ledger)."""


@dataclass(frozen=True)
class Loaded:
    """Counters and metrics of a learner, as read from a checkpoint."""

    optimizer_steps: int
    """Number of updates since the run's beginning that changed the weights."""
    metrics: dict[str, float]
    """Metrics of the last step, of a critic service; empty from a trainer's checkpoint."""
    skipped_in_a_row: int
    """Number of updates skipped since the last applied one, of a critic service; 0 from a trainer's checkpoint."""


class Kept:
    """Objects that a learner's snapshots reuse: host memory, and the boxes of the parameters."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self._boxes: dict[str, Boxes] = {}
        self.in_use = False
        """True while a snapshot uses the memory: from its start until it is written or abandoned."""

    def boxes(self, model: Any, name: str) -> Boxes:
        """Return the boxes of a model's parameters by `boxes_of`, which is called once per name."""
        if name not in self._boxes:
            self._boxes[name] = boxes_of(model, name)
        return self._boxes[name]

    def free_or_new(self) -> "Kept":
        """Return this object, or a new one if a snapshot still uses its memory, such as one that took too long."""
        return Kept() if self.in_use else self


def _fill(state: Stateful) -> None:
    for model in _trained(state).values():
        fill(model.optimizer)


def _plan(state: Stateful, copies: HostCopies, kept: Kept) -> PartFiles:
    """Plan this rank's files. Call `_fill` before. Raises RuntimeError if the host lacks memory for the copies."""
    return PartFiles(list(_stored(state, kept)), state.world.rank, read_generators(), copies)


class Snapshot:
    """Snapshot of a learner's state at construction, to be written to disk.

    Training may continue, but weights and optimizer state must not change before `copies` are complete.
    """

    def __init__(self, state: Stateful, folder: Path, kept: Kept) -> None:
        """Plan the files in the empty folder `folder`, and start copying the state. All ranks call this together."""
        self._kept, self._folder = kept, folder
        kept.in_use = True
        self.copies = HostCopies(state.world.device, kept.memory)
        _fill(state)
        # No indent: with one, json creates reference cycles.
        self._common = json.dumps(_common(state)).encode() if state.world.rank == 0 else b""
        self._files = _plan(state, self.copies, kept)
        self.nbytes = self._files.nbytes + len(self._common)
        """Size of the files that this rank writes, in bytes."""
        self.copies.start()

    def write(self) -> dict[str, dict[str, Any]]:
        """Write this rank's files and wait until they are on disk. Runs in a thread beside training.

        Returns:
            The files' sizes and checksums by name; see `checkpoint_folders.describe`.

        Raises:
            Exception: copying or writing failed, for example with OSError.
        """
        try:
            self.copies.check()
            written = {}
            if self._common:
                (self._folder / COMMON).write_bytes(self._common)
                sync(self._folder / COMMON)
                digest = hashlib.sha256(self._common).hexdigest()
                written[COMMON] = {"bytes": len(self._common), "sha256": digest}
            return written | self._files.write(self._folder)
        finally:
            self._kept.in_use = False

    def give_up(self) -> None:
        """Abandon the snapshot. Waits for its copies, whose memory the next one reuses. Raises the copies' error."""
        try:
            self.copies.check()
        finally:
            self._kept.in_use = False


class Checkpointed(ABC):
    """Base of learners whose state can be saved in checkpoints. All ranks make the same calls."""

    step: int
    """Last step on which the learner was trained; 0 before the first."""

    def __init__(self, world: World, timeout_seconds: float) -> None:
        """`timeout_seconds`: deadline of a snapshot's copies, for which changes of the state wait, in seconds."""
        self.world = world
        """Megatron world, with this rank's place in it."""
        self._timeout_seconds = timeout_seconds
        self._copies: HostCopies | None = None
        self._kept = Kept()

    @abstractmethod
    def checksum(self) -> int:
        """Return a checksum of this rank's weights, by `bit_sum`."""

    @abstractmethod
    def restore(self, folder: Path, step: int, *, same_layout: bool) -> None:
        """Load a step's checkpoint from `folder`. Raises CheckpointError if the checkpoint doesn't fit the learner."""

    @abstractmethod
    def _stateful(self, step: int) -> Stateful:
        """Return the state that the checkpoint of step `step` holds."""

    def prepare_snapshots(self) -> None:
        """Prepare boxes and host memory for the first snapshot, by planning a snapshot without taking it."""
        state, kept = self._stateful(self.step), self._kept
        _fill(state)
        _plan(state, HostCopies(state.world.device, kept.memory), kept)
        kept.memory.touch()

    def snapshot(self, folder: Path) -> Snapshot:
        """Start a snapshot of the state, to be written to an empty folder.

        The next change of the state waits until the snapshot's copies are complete.
        """
        self._wait_for_copies()
        self._kept = self._kept.free_or_new()
        snapshot = Snapshot(self._stateful(self.step), folder, self._kept)
        self._copies = snapshot.copies
        return snapshot

    def _wait_for_copies(self) -> None:
        """Wait until the last snapshot's copies are complete, so that weights and optimizer state may change."""
        copies, self._copies = self._copies, None
        if copies is not None:
            copies.wait_or_raise(self._timeout_seconds)


def _trained(state: Stateful) -> dict[str, TrainedModel]:
    return {POLICY: state.policy} | ({} if state.critic is None else {CRITIC: state.critic})


def _common(state: Stateful) -> dict[str, Any]:
    """Return the state that all ranks share, as values for JSON: optimizer settings, schedules and counters."""
    content: dict[str, Any] = {
        name: {"optimizer": read_groups(model.optimizer), "schedule": model.schedule.state_dict(), "step": state.step}
        for name, model in _trained(state).items()
    }
    return content | {
        "frozen": {role: {"step": state.step} for role, model in state.frozen.items() if model.refreshed},
        "optimizer_steps": state.optimizer_steps,
        "moments": state.moments,
        "metrics": dict(state.metrics),
        "skipped_in_a_row": state.skipped_in_a_row,
    }


def _stored(state: Stateful, kept: Kept) -> Iterator[Stored]:
    """Yield the pieces of models and optimizers that this rank saves."""
    for name, trained in _trained(state).items():
        boxes = kept.boxes(trained.model, name)
        for piece, tensor, saved in trained_pieces(boxes, single_optimizers(trained.optimizer)):
            if saved and (state.moments or piece.state == WEIGHTS):
                yield Stored(piece, tensor)
        yield from (Stored(piece, tensor) for piece, tensor, saved in untrained_pieces(boxes, share=True) if saved)
    for role, frozen in state.frozen.items():
        if frozen.refreshed:
            boxes = kept.boxes(frozen.module, role)
            for parameter in boxes:
                pieces = weight_pieces(boxes, parameter, share=True)
                yield from (Stored(piece, tensor) for piece, tensor, saved in pieces if saved)


def load_snapshot(state: Stateful, folder: Path, *, same_layout: bool) -> Loaded:
    """Load a checkpoint into a learner. All ranks call it together.

    Args:
        state: the newly built learner's state; the checkpoint must be of its step.
        folder: the checkpoint.
        same_layout: whether the parallel layout is the same as when it was saved. Only then are the random generators
            restored.

    Raises:
        CheckpointError: the checkpoint doesn't fit this model, or has no critic of this step.
        DiskWorkFailed, DiskStalled: another rank couldn't read its part.
    """
    common = _read_common(folder, state.world.disk)
    if state.critic is not None:
        _check_critic(state, folder, common)
    has_moments = common.get("moments", True)  # earlier releases wrote no such entry
    wanted: list[Wanted] = []
    for name, trained in _trained(state).items():
        fill(trained.optimizer)
        write_groups(trained.optimizer, common[name]["optimizer"])
        boxes = boxes_of(trained.model, name)
        found = trained_pieces(boxes, single_optimizers(trained.optimizer))
        wanted += _wanted(piece for piece in found if has_moments or piece[0].state == WEIGHTS)
        wanted += _wanted(untrained_pieces(boxes, share=False))
    refreshed = [model for role, model in state.frozen.items() if role in common["frozen"]]
    for frozen in refreshed:
        wanted += _weights(frozen.module, frozen.role)
    generators = _read(wanted, folder, state.world, generators=same_layout)
    for trained in _trained(state).values():
        use_loaded(trained.optimizer)
        if not has_moments:
            reset_moments(trained.optimizer)
    for name, trained in _trained(state).items():
        trained.schedule.num_steps = 0  # Megatron adds the checkpoint's steps to the schedule's
        trained.schedule.load_state_dict(common[name]["schedule"])
    for frozen in refreshed:
        frozen.refreshed = True
    if generators is not None:
        write_generators(generators)
    return Loaded(int(common["optimizer_steps"]), dict(common["metrics"]), int(common["skipped_in_a_row"]))


def load_model(model: StageModel, folder: Path, world: World) -> None:
    """Load a model's weights from a checkpoint, without optimizer state. All ranks call it together.

    Raises:
        CheckpointError: the checkpoint doesn't fit this model.
    """
    _read_common(folder, world.disk)
    _read(_weights(model, POLICY), folder, world, generators=False)


def _weights(model: Any, name: str) -> list[Wanted]:
    """Return the elements to load for a model's weights, with their targets in the model."""
    boxes = boxes_of(model, name)
    return [one for each in boxes for one in _wanted(weight_pieces(boxes, each))]


def _wanted(pieces: Pieces) -> list[Wanted]:
    """Return the pieces as elements to load. Call `write_groups` before, which replaces `Float8Values` by tensors."""
    return [Wanted(piece, cast(Tensor, tensor)) for piece, tensor, _ in pieces]


def _read(wanted: list[Wanted], folder: Path, world: World, *, generators: bool) -> dict[str, Any] | None:
    """Read the wanted elements into their targets. Returns this rank's random generator states, if requested."""
    with world.disk.all_ranks(f"reading {folder}") as progress:
        Loading(folder, world.rank, wanted).read(progress, world.device)
        return PartFile(folder / part_name(world.rank, 0)).generators if generators else None


def _read_common(folder: Path, disk: DiskWork) -> dict[str, Any]:
    """Read a checkpoint's common.json, the state that all ranks share. All ranks call it together.

    Raises:
        CheckpointError: the checkpoint is in an earlier format.
    """
    with disk.all_ranks(f"reading {folder}"):
        if (folder / "common.pt").exists():
            raise CheckpointError(
                f"{folder} is a checkpoint of an earlier release of relaxd, in a format that this one doesn't read: it "
                f"has common.pt, and not {COMMON}. Export it with that release (relaxd export), and start a run from "
                "the exported model"
            )
        return dict(json.loads((folder / COMMON).read_bytes()))


def _check_critic(state: Stateful, folder: Path, common: dict[str, Any]) -> None:
    """Raise CheckpointError unless a checkpoint has a critic of the policy's step."""
    found = common.get(CRITIC)
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


def read_generators() -> dict[str, Any]:
    """Return the states of this process's random generators."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
        "megatron": {name: _text(states) for name, states in get_cuda_rng_tracker().get_states().items()},
        "python": [version, list(numbers), gauss],
        "numpy": [name, np.asarray(keys).tolist(), *rest],
    }


def write_generators(states: dict[str, Any]) -> None:
    """Set this process's random generators to the states that `read_generators` returned."""
    torch.set_rng_state(_state(states["torch"]))
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_state(states["cuda"]))
    get_cuda_rng_tracker().set_states({name: _state(text) for name, text in states["megatron"].items()})
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.asarray(keys, np.uint32), *rest))


def _text(state: Tensor) -> str:
    """Return a random generator's state as hexadecimal text."""
    return state.cpu().numpy().tobytes().hex()


def _state(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
