"""Step files: a step's plan and its groups' columns, in one safetensors file in the run's folder.

A step is committed only once its file is durable. The board may then free the groups, and a restarted trainer replays
the files to restore its weights.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from services.trainer.batch.disk_files import errors_of_the_system, sync
from services.trainer.batch.step_plan import PlanError, StepPlan

JSON_SUFFIX = ":json"
"""Suffix of tensors that hold a JSON value as UTF-8."""

Columns = Mapping[str, Any]
"""A group's columns: numpy arrays, or JSON values."""


class StepFileError(Exception):
    """A step file is missing, damaged, or belongs to another step than the ledger says."""


@dataclass(frozen=True)
class StepFile:
    """Content of a step file."""

    plan: StepPlan
    """The step's plan."""
    groups: dict[str, dict[str, Any]]
    """Columns by group id."""


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
        OSError: it can't be written, such as on a full disk; nothing of it is left there.
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
