"""The checkpoints of a run on the disk: names, what makes one valid, which are kept. Never imports torch.

checkpoints/step-000020/           complete: it got this name only once everything in it was on the disk
    manifest.json                  size and SHA-256 of every other file
    state.json                     what isn't a tensor: step, ledger, data cursor, configuration
    common.pt .metadata metadata.json __0_0.distcp ...    Megatron's
checkpoints/.step-000040.3.partial being written by the trainer of term 3
checkpoints/step-000040.broken     found damaged, put aside
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from services.trainer.batch.durable import sync
from services.trainer.batch.plan import OUTCOME

MANIFEST, STATE = "manifest.json", "state.json"
CHUNK_BYTES = 1 << 20
"""Read at once for a checksum."""
LEAVING_TERM = 0
"""In the place of a trainer's term: of checkpoints that are being removed."""
NAME = re.compile(r"step-(\d{6,})")
REPORT = re.compile(r"written-(\d+)\.json")


class CheckpointBroken(Exception):
    """A checkpoint isn't what it was when it was written; the message says which file, and how."""


class Ledger(BaseModel):
    """Which committed step a checkpoint comes after."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """0 before the first."""
    term: int = 0
    """Term of the trainer that took it."""
    plan_sha256: str = ""
    """`plan_sha256` of its plan."""


class BoardState(BaseModel):
    """Where the run's groups were: enough to publish what is neither trained nor dropped anew, on an empty board."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: Any
    """The data cursor."""
    open_groups: tuple[str, ...]
    """Ids of the groups that are neither trained nor dropped, and of dropped ones whose prompt waits for a retry."""
    published: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]


class CheckpointState(BaseModel):
    """state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    run_id: str
    step: int
    """The weights' version."""
    term: int
    """Term of the trainer that wrote it."""
    ledger: Ledger
    board: BoardState
    trainer: dict[str, Any]
    """Section trainer of the configuration."""
    algorithm: dict[str, Any]
    """Section algorithm. Algorithms have no state of their own: the reference model is the initial one."""
    weights_checksum: int = 0
    """`Learner.checksum`, summed over all ranks."""
    versions: dict[str, str]
    """Releases of relaxd, torch and megatron-core."""


def checkpoints_folder(run_folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return run_folder / "checkpoints"


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return checkpoints_folder(run_folder) / f"step-{step:06d}"


def partial_path(run_folder: Path, step: int, term: int) -> Path:
    """Where it is written first. The term keeps a frozen trainer that wakes up out of its successor's files."""
    return checkpoints_folder(run_folder) / f".step-{step:06d}.{term}.partial"


def checkpoint_steps(run_folder: Path) -> list[int]:
    """Steps of the complete checkpoints, newest first."""
    folder = checkpoints_folder(run_folder)
    found = (NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest_before(run_folder: Path, step: int) -> int | None:
    """The newest checkpoint of `step` or an earlier one."""
    return next((found for found in checkpoint_steps(run_folder) if found <= step), None)


def plan_sha256(plan: Mapping[str, Any]) -> str:
    """The checksum of a plan as the step file has it. A ledger that is restored from step files knows no outcome."""
    planned = {name: value for name, value in plan.items() if name != OUTCOME}
    return hashlib.sha256(json.dumps(planned, sort_keys=True).encode()).hexdigest()


def describe(path: Path, progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Size and checksum of a file, for the manifest; `progress` is called with the bytes that have been read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_report(partial: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Say in the folder that a rank has written its files ("files": by name), or that it couldn't ("error")."""
    temporary = partial / f".written-{rank}.tmp"
    temporary.write_text(json.dumps(report))
    os.replace(temporary, partial / f"written-{rank:05d}.json")


def read_reports(partial: Path) -> dict[int, dict[str, Any]]:
    """What ranks have said so far."""
    found = ((REPORT.fullmatch(path.name), path) for path in partial.iterdir())
    return {int(match[1]): json.loads(path.read_text()) for match, path in found if match}


def seal(partial: Path, final: Path, state: CheckpointState) -> None:
    """Make a folder in which every rank has written its files a checkpoint: all of it or nothing.

    Raises:
        OSError: it can't be written, or there is a checkpoint of this step.
    """
    files: dict[str, Any] = {}
    for report in read_reports(partial).values():
        files |= report["files"]
    (partial / STATE).write_text(state.model_dump_json(indent=2) + "\n")
    for path in sorted(partial.iterdir()):
        if REPORT.fullmatch(path.name):
            path.unlink()
        elif path.name not in files:
            sync(path)
            files[path.name] = describe(path)
    (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=2, sort_keys=True) + "\n")
    sync(partial / MANIFEST)
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def read_state(path: Path) -> CheckpointState:
    """Read a checkpoint's state.json.

    Raises:
        CheckpointBroken: it is missing or damaged.
    """
    try:
        return CheckpointState.model_validate_json((path / STATE).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointBroken(f"{path / STATE} can't be read: {error}") from error


def verify(path: Path, share: int = 0, shares: int = 1, progress: Callable[[int], None] = lambda count: None) -> None:
    """Compare a checkpoint's files with its manifest.

    Args:
        path: the checkpoint.
        share: which part of the files this process reads, from 0.
        shares: how many processes share the reading.
        progress: called with the bytes that have been read.

    Raises:
        CheckpointBroken: a file is missing, or not as it was written.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text())["files"]
        for number, (name, expected) in enumerate(sorted(files.items())):
            if (path / name).stat().st_size != expected["bytes"]:
                raise CheckpointBroken(f"{path / name} has {(path / name).stat().st_size} bytes, not {expected}")
            if number % shares == share and describe(path / name, progress) != expected:
                raise CheckpointBroken(f"{path / name} is damaged: its checksum isn't the manifest's")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointBroken(f"{path} is damaged: {error}") from error


def put_aside(path: Path) -> Path:
    """Rename a checkpoint that is broken, so that it is neither used nor in the way. Returns where it is now."""
    aside = path.with_name(path.name + ".broken")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def remove_partials(run_folder: Path, before_term: int) -> None:
    """Remove what trainers of earlier terms did not finish."""
    for path in checkpoints_folder(run_folder).glob(".step-*.partial"):
        if int(path.name.split(".")[2]) < before_term:
            shutil.rmtree(path, ignore_errors=True)


def remove_leaving(run_folder: Path) -> threading.Thread:
    """Remove what `rotate` put out of sight, in the thread that is returned; what is left, the next trainer removes."""
    arguments = (run_folder, LEAVING_TERM + 1)
    thread = threading.Thread(target=remove_partials, args=arguments, name="remove-checkpoints")
    thread.start()
    return thread


def rotate(run_folder: Path, keep: int) -> int | None:
    """Put all checkpoints but the newest `keep` out of sight; `remove_leaving` removes them, which can take a second.

    Returns:
        The step of the oldest one that is kept, once there are as many as that: what came before it isn't needed any
        more to bring the weights back, even if the newest turns out to be broken. None before.
    """
    steps = checkpoint_steps(run_folder)
    for step in steps[keep:]:
        # Out of sight at once: a checkpoint that is half removed must not be taken for one.
        path = checkpoint_path(run_folder, step)
        os.rename(path, path.with_name(f".{path.name}.{LEAVING_TERM}.partial"))
    for path in checkpoints_folder(run_folder).glob("step-*.broken"):
        if steps and int(path.name.split("-")[1].split(".")[0]) < steps[:keep][-1]:
            shutil.rmtree(path, ignore_errors=True)
    return steps[keep - 1] if len(steps) >= keep else None
