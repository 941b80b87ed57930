"""The checkpoint folders of a run: names, validation, rotation. Never imports torch.

checkpoints/step-000020/           complete: renamed to this once everything in it was on disk
    manifest.json                  size and SHA-256 of every other file
    state.json                     step, ledger, data cursor, configuration: everything but tensors
    common.pt .metadata metadata.json __0_0.distcp ...    Megatron's: __RANK_NUMBER, several of a large rank
    kept                           only in one that was requested: it is never removed
checkpoints/.step-000040.3.partial being written by the trainer of term 3
checkpoints/step-000040.broken     found damaged, renamed
critic/checkpoints/...             the same, of a critic service
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from services.trainer.batch.durable import sync
from services.trainer.batch.step_plan import OUTCOME

MANIFEST, STATE = "manifest.json", "state.json"
KEPT = "kept"
"""Empty file in a checkpoint that is never removed."""
CHUNK_BYTES = 1 << 20
"""Bytes per read for a checksum."""
READERS = 8
"""Files that are read at the same time for their checksums."""
REPORT_SECONDS = 0.2
"""Interval at which progress is reported."""
REMOVED_TERM = 0
"""Replaces the trainer's term in the names of checkpoints being removed."""
NAME = re.compile(r"step-(\d{6,})")
REPORT = re.compile(r"written-(\d+)\.json")


class CheckpointBroken(Exception):
    """A file of a checkpoint is missing or has changed since it was written."""


class Ledger(BaseModel):
    """The committed step of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Number of the step; 0 before the first."""
    term: int = 0
    """Term of the trainer that took it."""
    plan_sha256: str = ""
    """`plan_sha256` of its plan."""


class BoardState(BaseModel):
    """State of the run's groups, from which an empty board can be restored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: Any
    """The data cursor."""
    open_groups: tuple[str, ...]
    """Ids of groups that are open, or dropped with their prompt waiting for a retry."""
    published: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]


class CheckpointState(BaseModel):
    """The content of state.json."""

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
    """The configuration's section trainer."""
    algorithm: dict[str, Any]
    """The configuration's section algorithm. Algorithms have no state; the reference is the initial model, and
    the critic is beside the policy."""
    weights_checksum: int = 0
    """`Learner.checksum`, summed over all ranks."""
    versions: dict[str, str]
    """Releases of relaxd, torch and megatron-core."""


def critic_folder(run_folder: Path) -> Path:
    """Return the folder of a critic service in a run's folder. It has checkpoints of its own, of the same steps."""
    return run_folder / "critic"


def checkpoints_folder(run_folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return checkpoints_folder(run_folder) / f"step-{step:06d}"


def partial_path(run_folder: Path, step: int, term: int) -> Path:
    """Return the path of an unfinished checkpoint. The term keeps a revived trainer out of its successor's files."""
    return checkpoints_folder(run_folder) / f".step-{step:06d}.{term}.partial"


def checkpoint_steps(run_folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, newest first."""
    folder = checkpoints_folder(run_folder)
    found = (NAME.fullmatch(path.name) for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest_before(run_folder: Path, step: int) -> int | None:
    """Return the step of the newest checkpoint up to `step`."""
    return next((found for found in checkpoint_steps(run_folder) if found <= step), None)


def plan_sha256(plan: Mapping[str, Any]) -> str:
    """Return a plan's checksum without its outcome, which step files, and ledgers restored from them, don't have."""
    planned = {name: value for name, value in plan.items() if name != OUTCOME}
    return hashlib.sha256(json.dumps(planned, sort_keys=True).encode()).hexdigest()


def describe(path: Path, progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Return a file's size and checksum for the manifest; call `progress` with the bytes read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def describe_all(
    paths: Iterable[Path], progress: Callable[[int], None] = lambda count: None
) -> dict[str, dict[str, Any]]:
    """Return `describe` of several files by name, read at the same time; call `progress` in this thread.

    Raises:
        OSError: a file can't be read.
    """
    read: SimpleQueue[int] = SimpleQueue()
    with ThreadPoolExecutor(READERS, "checksum") as pool:
        found = {path.name: pool.submit(describe, path, read.put) for path in paths}
        reading = set(found.values())
        while reading:
            _, reading = wait(reading, REPORT_SECONDS)  # named: the caller's work, with what `progress` counts
            while not read.empty():
                progress(read.get_nowait())
    return {name: work.result() for name, work in found.items()}


def write_report(partial: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Write a rank's report to the folder: its files by name ("files"), or its error ("error")."""
    temporary = partial / f".written-{rank}.tmp"
    temporary.write_text(json.dumps(report))
    os.replace(temporary, partial / f"written-{rank:05d}.json")


def read_reports(partial: Path) -> dict[int, dict[str, Any]]:
    """Read the ranks' reports so far."""
    found = ((REPORT.fullmatch(path.name), path) for path in partial.iterdir())
    return {int(match[1]): json.loads(path.read_text()) for match, path in found if match}


def seal(partial: Path, final: Path, state: CheckpointState) -> None:
    """Atomically turn a folder with all ranks' files into a checkpoint.

    Raises:
        OSError: it can't be written, or a checkpoint of this step exists.
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
        share: number of this process among those that share the reading, from 0.
        shares: number of these processes.
        progress: called with the bytes read.

    Raises:
        CheckpointBroken: a file is missing or has changed.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_text())["files"]
        for name, expected in files.items():
            if (path / name).stat().st_size != expected["bytes"]:
                raise CheckpointBroken(f"{path / name} has {(path / name).stat().st_size} bytes, not {expected}")
        own = sorted(files)[share::shares]
        for name, found in describe_all((path / name for name in own), progress).items():
            if found != files[name]:
                raise CheckpointBroken(f"{path / name} is damaged: its checksum isn't the manifest's")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointBroken(f"{path} is damaged: {error}") from error


def put_aside(path: Path) -> Path:
    """Rename a broken checkpoint, so that it isn't used. Returns its new path."""
    aside = path.with_name(path.name + ".broken")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def remove_partials(run_folder: Path, before_term: int) -> None:
    """Remove the unfinished checkpoints of trainers of earlier terms."""
    for path in checkpoints_folder(run_folder).glob(".step-*.partial"):
        if int(path.name.split(".")[2]) < before_term:
            shutil.rmtree(path, ignore_errors=True)


def remove_rotated(run_folder: Path) -> threading.Thread:
    """Start, and return, a thread that removes checkpoints renamed by `rotate`. The next trainer removes leftovers."""
    arguments = (run_folder, REMOVED_TERM + 1)
    thread = threading.Thread(target=remove_partials, args=arguments, name="remove-checkpoints")
    thread.start()
    return thread


def keep(path: Path) -> None:
    """Mark a checkpoint as one that is never removed. Raises OSError."""
    (path / KEPT).touch()
    sync(path)


def oldest_kept(run_folder: Path, keep: int) -> int | None:
    """Return the step of the oldest of the newest `keep` checkpoints, None if there are fewer.

    Earlier steps are no longer needed to restore the weights, even if newer checkpoints are broken.
    """
    steps = checkpoint_steps(run_folder)
    return steps[keep - 1] if len(steps) >= keep else None


def rotate(run_folder: Path, keep: int) -> int | None:
    """Rename checkpoints beyond the newest `keep` unless they are marked; `remove_rotated` removes them.

    Returns:
        `oldest_kept`.
    """
    steps = checkpoint_steps(run_folder)
    for step in steps[keep:]:
        path = checkpoint_path(run_folder, step)
        if (path / KEPT).exists():
            continue
        # Rename first: removing takes a second, and a half-removed checkpoint must not look complete.
        os.rename(path, path.with_name(f".{path.name}.{REMOVED_TERM}.partial"))
    for path in checkpoints_folder(run_folder).glob("step-*.broken"):
        if steps and int(path.name.split("-")[1].split(".")[0]) < steps[:keep][-1]:
            shutil.rmtree(path, ignore_errors=True)
    return oldest_kept(run_folder, keep)
