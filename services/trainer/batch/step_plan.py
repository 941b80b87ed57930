"""The plan of a step: its groups, their order, and their division into mini-batches, ranks and micro-batches; and the
step's file, with its plan and its groups' columns: one safetensors file in the run's folder.

A floating-point sum depends on the order of its terms. The plan records the whole division, so the step's arithmetic
can be replayed from the plan and the groups' columns. A step is committed only once its file is durable. The board may
then free the groups, and a restarted trainer replays the files to restore its weights.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relaxd.algorithms.advantage_terms import Whitening
from services.trainer.batch.disk_files import errors_of_the_system, sync
from services.trainer.megatron.rank_messages import message

OUTCOME = "skipped_updates"
"""Field of a recorded plan: indices of skipped updates. The trainer adds it after the step's updates."""


class PlanError(ValueError):
    """Raised if a recorded plan is malformed."""


@message
@dataclass(frozen=True)
class SequenceSlice:
    """Sequences of one group that are in the same micro-batch."""

    group_id: str
    """Id of the group."""
    sequences: tuple[int, ...]
    """Indices of the sequences in the group, ascending. No sequence is in two slices."""


MicroBatchSlices = tuple[SequenceSlice, ...]
"""Slices of groups that are packed into one micro-batch."""


@message
@dataclass(frozen=True)
class MicroBatchRound:
    """Micro-batches that all data-parallel ranks process together, equally many on each."""

    micro_batches: tuple[tuple[MicroBatchSlices, ...], ...]
    """Micro-batches by data-parallel rank. Every rank has the same number; some may be empty."""

    @property
    def group_ids(self) -> set[str]:
        """Ids of the groups with a sequence in this round."""
        return {piece.group_id for rank in self.micro_batches for micro_batch in rank for piece in micro_batch}

    def to_json(self) -> list[Any]:
        """Return the round as nested lists: ranks, micro-batches, [group id, [sequence indices]]."""
        return [
            [[[piece.group_id, list(piece.sequences)] for piece in micro_batch] for micro_batch in rank]
            for rank in self.micro_batches
        ]

    @classmethod
    def from_json(cls, value: list[Any]) -> "MicroBatchRound":
        """Restore a round from the lists that `to_json` returns."""
        return cls(
            tuple(
                tuple(
                    tuple(SequenceSlice(group, tuple(sequences)) for group, sequences in micro_batch)
                    for micro_batch in rank
                )
                for rank in value
            )
        )


@dataclass(frozen=True)
class MiniBatch:
    """Groups of one optimizer update, packed into rounds of micro-batches."""

    rounds: tuple[MicroBatchRound, ...]
    """Rounds of micro-batches, in the order of training."""
    samples: int
    """Number of samples in all groups of the mini-batch."""
    trained_tokens: int
    """Number of tokens with loss_mask 1 in all groups of the mini-batch."""
    normalizer: float
    """Number by which the update's summed loss is divided."""

    @property
    def group_ids(self) -> set[str]:
        """Ids of the groups in this mini-batch."""
        return set[str]().union(*(entry.group_ids for entry in self.rounds))

    def to_json(self) -> dict[str, Any]:
        """Return the mini-batch as JSON for a plan."""
        return {
            "rounds": [entry.to_json() for entry in self.rounds],
            "samples": self.samples,
            "trained_tokens": self.trained_tokens,
            "normalizer": self.normalizer,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "MiniBatch":
        """Restore a mini-batch from the JSON that `to_json` returns."""
        return cls(
            rounds=tuple(MicroBatchRound.from_json(entry) for entry in value["rounds"]),
            samples=int(value["samples"]),
            trained_tokens=int(value["trained_tokens"]),
            normalizer=float(value["normalizer"]),
        )


@dataclass(frozen=True)
class StepPlan:
    """All inputs of a step's arithmetic except the groups' columns."""

    step: int
    """Number of the step, counted from 1."""
    term: int
    """Term of the trainer that made the step."""
    seed: int
    """Seed of torch's generators."""
    groups: tuple[str, ...]
    """Ids of the step's groups, in the order in which the step took them."""
    mini_batches: tuple[MiniBatch, ...]
    """The step's mini-batches, in the order of their updates. Each group is in exactly one."""
    epochs: int = 1
    """Number of times that the step trains on each mini-batch."""
    whitening: Whitening | None = None
    """Normalisation of the advantages before training; None to use them unchanged."""
    refreshed: tuple[str, ...] = ()
    """Roles whose models get a copy of the policy's weights after the step."""
    reference: str = ""
    """Name of the weights with which the reference service scored the groups (`weights_after`); "" for the initial
    weights."""
    skipped_updates: tuple[int, ...] | None = None
    """Indices in `updates` of the updates skipped because their loss or gradient wasn't finite. None if unknown, as in
    a step file, which is written before the updates."""

    @property
    def updates(self) -> tuple[MiniBatch, ...]:
        """Mini-batch of each of the step's updates, in order."""
        return self.mini_batches * self.epochs

    def groups_of(self, mini_batch: MiniBatch) -> list[str]:
        """Return the ids of a mini-batch's groups, in the order of `groups`."""
        ids = mini_batch.group_ids
        return [group_id for group_id in self.groups if group_id in ids]

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON for the ledger and the step file."""
        outcome = {} if self.skipped_updates is None else {OUTCOME: list(self.skipped_updates)}
        whitening = {} if self.whitening is None else {"whitening": asdict(self.whitening)}
        return {
            "step": self.step,
            "term": self.term,
            "seed": self.seed,
            "groups": list(self.groups),
            "mini_batches": [mini_batch.to_json() for mini_batch in self.mini_batches],
            "epochs": self.epochs,
            **whitening,
            **({"refreshed": list(self.refreshed)} if self.refreshed else {}),
            **({"reference": self.reference} if self.reference else {}),
            **outcome,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StepPlan":
        """Restore a plan from the JSON that `to_json` returns.

        Raises:
            PlanError: a field is missing or of another kind.
        """
        try:
            return cls(
                step=int(value["step"]),
                term=int(value["term"]),
                seed=int(value["seed"]),
                groups=tuple(str(group) for group in value["groups"]),
                # A plan of an earlier release is its only mini-batch.
                mini_batches=tuple(MiniBatch.from_json(one) for one in value.get("mini_batches", [value])),
                epochs=int(value.get("epochs", 1)),
                whitening=Whitening(**value["whitening"]) if "whitening" in value else None,
                refreshed=tuple(str(role) for role in value.get("refreshed", ())),
                reference=str(value.get("reference", "")),
                skipped_updates=tuple(int(update) for update in value[OUTCOME]) if OUTCOME in value else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"malformed step plan: {error!r}") from error


SCHEDULE = 20
"""Number of micro-batches per pipeline stage beyond the first, in a schedule that runs while a step fills. A stage then
idles for 1/21 of the schedule."""


def schedule_length(stages: int, chunks: int = 1) -> int:
    """Return the number of micro-batches per data-parallel rank in a round that runs before the step is full.

    With several model chunks per stage, the number is a multiple of `stages`, so that `group_size` is smallest.
    """
    length = max(1, SCHEDULE * (stages - 1))
    return length if chunks == 1 else length + -length % stages


def group_size(micro_batches: int, stages: int) -> int:
    """Return the number of consecutive micro-batches that a stage runs through one model chunk before the next chunk.

    This is the smallest size at which each set of micro-batches, also the last, has at least one micro-batch per stage.
    Megatron refuses smaller sets; larger sets take more memory.

    Raises:
        ValueError: there are fewer micro-batches than stages.
    """
    for size in range(stages, micro_batches + 1):
        rest = micro_batches % size
        if rest == 0 or rest >= stages:
            return size
    raise ValueError(f"{micro_batches} micro-batches are fewer than the {stages} stages that chunks need")


def bubble_share(rounds: Iterable[MicroBatchRound], stages: int, chunks: int = 1) -> float:
    """Return the share of a stage's time in which it waits for its pipeline to fill and drain.

    A schedule of m micro-batches on p stages with v chunks each takes as long as m + (p - 1) / v of them (arXiv
    2104.04473, section 2.2), so the share is (p - 1) / (v m + p - 1). If m is less than p, second chunks run only when
    the first micro-batch has passed the first chunks of all stages, and so on. Each round is a schedule.
    """
    idle = total = 0
    for entry in rounds:
        count = len(entry.micro_batches[0])
        passes = chunks * max(count, stages) + min(count, stages) - 1  # of a micro-batch through a chunk
        idle += passes - chunks * count
        total += passes
    return idle / total if total else 0.0


JSON_SUFFIX = ":json"
"""Suffix of the names of tensors that hold a JSON value as UTF-8 bytes."""

Columns = Mapping[str, Any]
"""Columns of a group by name: numpy arrays, or JSON values."""


class StepFileError(Exception):
    """Raised if a step file is missing or damaged, or does not match the step in the ledger."""


@dataclass(frozen=True)
class StepFile:
    """Content of a step file."""

    plan: StepPlan
    """The step's plan."""
    groups: dict[str, dict[str, Any]]
    """Columns of each group, by group id."""


def step_file_path(run_folder: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return run_folder / "steps" / f"step-{step:06d}.safetensors"


def write_step_file(path: Path, plan: StepPlan, groups: Mapping[str, Columns]) -> None:
    """Write a step file atomically and wait until it is on disk.

    Args:
        path: the file; an existing one, of a step that was never committed, is replaced.
        plan: the step's plan.
        groups: columns by group id, of every group in the plan.

    Raises:
        OSError: the file can't be written, for example on a full disk; no part of it remains.
    """
    tensors: dict[str, np.ndarray] = {}
    for group_id in plan.groups:
        for name, column in groups[group_id].items():
            if isinstance(column, np.ndarray):
                tensors[f"{group_id}/{name}"] = np.ascontiguousarray(column)
            else:
                text = json.dumps(column, ensure_ascii=False).encode()
                tensors[f"{group_id}/{name}{JSON_SUFFIX}"] = np.frombuffer(text, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    # The term in the name keeps a revived old trainer from writing into its successor's file.
    partial = path.with_name(f"{path.name}.{plan.term}.partial")
    try:
        with errors_of_the_system(partial):
            save_file(tensors, partial, metadata={"plan": json.dumps(plan.to_json())})
        sync(partial)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def read_step_file(
    path: Path,
    progress: Callable[[int], None] = lambda count: None,
    names: Collection[str] | None = None,
) -> StepFile:
    """Read a step file.

    Args:
        path: the file.
        progress: called with the bytes read.
        names: the columns to read; None: all.

    Raises:
        StepFileError: it is missing or damaged.
    """
    groups: dict[str, dict[str, Any]] = {}
    try:
        with safe_open(path, "numpy") as file:
            plan = StepPlan.from_json(json.loads(file.metadata()["plan"]))
            for key in file.keys():  # noqa: SIM118  not a dict
                group_id, _, name = key.rpartition("/")
                if names is not None and name.removesuffix(JSON_SUFFIX) not in names:
                    continue
                value = file.get_tensor(key)
                progress(value.nbytes)
                if name.endswith(JSON_SUFFIX):
                    name, value = name.removesuffix(JSON_SUFFIX), json.loads(value.tobytes())
                groups.setdefault(group_id, {})[name] = value
    except FileNotFoundError as error:
        raise StepFileError(f"{path} is missing: the trainer's weights can't be restored without it") from error
    except (OSError, SafetensorError, PlanError, ValueError, KeyError, TypeError) as error:
        raise StepFileError(f"{path} is damaged: {error}") from error
    missing = [group for group in plan.groups if group not in groups]
    if missing:
        raise StepFileError(f"{path} is damaged: it has no columns of group {missing[0]}")
    return StepFile(plan, groups)


def read_committed(
    run_folder: Path,
    step: int,
    ledger_plan: Mapping[str, Any],
    progress: Callable[[int], None] = lambda count: None,
    names: Collection[str] | None = None,
) -> StepFile:
    """Read the file of a committed step and verify that its plan is the committed one.

    Args:
        run_folder: the run's folder.
        step: the step.
        ledger_plan: the step's plan in the board's ledger, whose `skipped_updates` the returned plan has.
        progress: called with the bytes read.
        names: the columns to read; None: all.

    Raises:
        StepFileError: it is missing, damaged, or has another plan.
    """
    path = step_file_path(run_folder, step)
    found, committed = read_step_file(path, progress, names), StepPlan.from_json(ledger_plan)
    if found.plan != replace(committed, skipped_updates=None):
        raise StepFileError(f"{path} has another plan than the ledger has for step {step}: it isn't the committed one")
    return StepFile(committed, found.groups)
