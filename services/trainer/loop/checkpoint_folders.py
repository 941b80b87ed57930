"""The folders of weights in a run's folder: checkpoints, with their content, validation, rotation and limit on the
disk, and the weights that a reference service takes over (`roles.reference.refresh_every`). Never imports torch.

`restore` in checkpoint_control.py chooses which checkpoint is loaded.

checkpoints/step-000020/           complete: renamed to this once everything in it was on disk
    manifest.json                  size and SHA-256 of every other file
    state.json                     step, ledger, data cursor, configuration: everything but tensors
    common.json                    settings of the optimizers, schedules, counters
    rank-00000-0.safetensors ...   each rank's part: rank-RANK-NUMBER
    kept                           only in a requested one that is never removed
checkpoints/.step-000040.3.partial being written by the trainer of term 3
checkpoints/step-000040.broken     found damaged, renamed
critic/checkpoints/...             the same, of a critic service
reference/step-000050.1            Hugging Face folder of the weights after step 50, by the trainer of term 1
reference/step-000100.1.partial    being written

A reference's folder is complete before its step is committed, and the ledger says which one is in force. So no
replica reads the folder of a trainer that died before its commit or was replaced.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from relaxd.roles import REFERENCE
from relaxd.run_folder import (
    CHECKPOINT_STATE,
    CHECKPOINTS,
    KEPT,
    STEPS,
    checkpoint_path,
    checkpoint_steps,
    checkpoints_folder,
)
from services.trainer.batch.disk_files import in_parallel, sync
from services.trainer.batch.step_plan import OUTCOME

logger = logging.getLogger(__name__)


def size_of(run_folder: Path, step: int) -> int:
    """Return the total size of a checkpoint's files, in bytes. Raises OSError."""
    return sum(file.stat().st_size for file in checkpoint_path(run_folder, step).iterdir())


def is_marked(run_folder: Path, step: int) -> bool:
    """Return True if a checkpoint is marked as never to be removed."""
    return (checkpoint_path(run_folder, step) / KEPT).exists()


def room_for_more(run_folder: Path, max_bytes: int) -> int:
    """Return the bytes of `max_bytes` that are left after the next checkpoint; negative if the limit is exceeded.

    The next checkpoint is assumed to be as large as the newest.
    """
    steps = checkpoint_steps(run_folder)
    coming = size_of(run_folder, steps[0]) if steps else 0
    return max_bytes - coming - sum(size_of(run_folder, step) for step in steps)


def beyond(run_folder: Path, max_bytes: int, protected: Collection[int] = ()) -> list[int]:
    """Return the steps of the checkpoints to remove, oldest first, so that the next one fits into `max_bytes`.

    The newest checkpoint is never removed, nor are marked and protected ones.
    """
    room, found = room_for_more(run_folder, max_bytes), []
    for step in reversed(checkpoint_steps(run_folder)[1:]):
        if room >= 0:
            break
        if step not in protected and not is_marked(run_folder, step):
            room += size_of(run_folder, step)
            found.append(step)
    return found


REFERENCE_FOLDER = "reference"
"""Subfolder of the run's folder with the weights that a reference service loads."""
MANIFEST = "manifest.json"
PART = re.compile(r"rank-(\d+)-")
"""Beginning of the names of checkpoint files that a rank writes; group 1 is the rank."""
CHUNK_BYTES = 1 << 20
"""Size of one read when a file's checksum is computed, in bytes."""
REMOVED_TERM = 0
"""Term in the names of checkpoints that are being removed; no trainer has this term."""
UNFINISHED = {
    CHECKPOINTS: re.compile(r"\.step-\d{6,}\.(\d+)\.partial"),
    STEPS: re.compile(r"step-\d{6,}\.safetensors\.(\d+)\.partial"),
    REFERENCE_FOLDER: re.compile(r"step-\d{6,}\.(\d+)\.partial"),
}
"""Patterns of unfinished files and folders that a dead trainer leaves, by subfolder of the run's folder; group 1 is
the trainer's term."""


class CheckpointBroken(Exception):
    """Raised if a file of a checkpoint is missing, or was changed after it was written."""


class Ledger(BaseModel):
    """Committed step whose weights a checkpoint contains, as the ledger identifies the step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    """Number of the step; 0 for the initial weights."""
    term: int = 0
    """Term of the trainer that made the step."""
    plan_sha256: str = ""
    """SHA-256 checksum of the step's plan, by the function `plan_sha256`."""


class BoardState(BaseModel):
    """State of a run's groups, from which an empty board can be restored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cursor: Any
    """Cursor of the data sources: where the run continues to read prompts."""
    open_groups: tuple[str, ...]
    """Ids of groups that are not finished, or were dropped with their prompt waiting for a retry."""
    published: int
    trained: int
    dropped: int
    dropped_by_reason: dict[str, int]


class CheckpointState(BaseModel):
    """Content of a checkpoint's file state.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    run_id: str
    step: int
    """Step after which the checkpoint was taken; also the version of its weights."""
    term: int
    """Term of the trainer that wrote the checkpoint."""
    ledger: Ledger
    board: BoardState
    trainer: dict[str, Any]
    """Section trainer of the run's configuration."""
    algorithm: dict[str, Any]
    """Section algorithm of the run's configuration. Algorithms have no state."""
    weights_checksum: int = 0
    """Checksum of the weights: the sum of `Learner.checksum` over all ranks."""
    versions: dict[str, str]
    """Versions of relaxd, torch and megatron-core that wrote the checkpoint."""


def partial_path(run_folder: Path, step: int, term: int) -> Path:
    """Return the path of an unfinished checkpoint. It contains the term, so that trainers never share a path."""
    return checkpoints_folder(run_folder) / f".step-{step:06d}.{term}.partial"


def plan_sha256(plan: Mapping[str, Any]) -> str:
    """Return a plan's SHA-256 checksum without OUTCOME, which step files and ledgers restored from them lack."""
    planned = {name: value for name, value in plan.items() if name != OUTCOME}
    return hashlib.sha256(json.dumps(planned, sort_keys=True).encode()).hexdigest()


def describe(path: Path, progress: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Return a file's size and checksum for the manifest; call `progress` with the number of bytes of each read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            progress(len(chunk))
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def describe_all(
    paths: Iterable[Path], progress: Callable[[int], None] = lambda count: None
) -> dict[str, dict[str, Any]]:
    """Return sizes and checksums of several files for the manifest, by file name. Threads read the files.

    `progress` is called in the calling thread with the number of bytes of each read.

    Raises:
        OSError: a file can't be read.
    """
    return in_parallel({path.name: partial(describe, path) for path in paths}, progress)


def seal(partial: Path, final: Path, state: CheckpointState, written: Mapping[str, Any], *, kept: bool = False) -> None:
    """Add manifest and state to a folder with all ranks' files, and rename it atomically to a complete checkpoint.

    Args:
        partial: folder with the ranks' files.
        final: the checkpoint's path.
        state: content of state.json.
        written: `describe` of the ranks' files, by name; other files are read here.
        kept: whether to mark the checkpoint as kept for ever.

    Raises:
        OSError: it can't be written, or a checkpoint of this step exists.
    """
    files = dict(written)
    (partial / CHECKPOINT_STATE).write_text(state.model_dump_json(indent=2) + "\n")
    for path in sorted(partial.iterdir()):
        if path.name not in files:
            sync(path)
            files[path.name] = describe(path)
    (partial / MANIFEST).write_text(json.dumps({"files": files}, indent=2, sort_keys=True) + "\n")
    sync(partial / MANIFEST)
    if kept:
        keep(partial)
    sync(partial)
    os.rename(partial, final)
    sync(final.parent)


def read_state(path: Path) -> CheckpointState:
    """Read a checkpoint's state.json.

    Raises:
        CheckpointBroken: it is missing or damaged.
    """
    try:
        return CheckpointState.model_validate_json((path / CHECKPOINT_STATE).read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointBroken(f"{path / CHECKPOINT_STATE} can't be read: {error}") from error


def verify(path: Path, share: int = 0, shares: int = 1, progress: Callable[[int], None] = lambda count: None) -> None:
    """Compare a checkpoint's files with its manifest.

    Args:
        path: the checkpoint.
        share: index of this process among those that share the reading. In the layout that wrote the checkpoint, a
            rank thus reads its own part, which it loads next.
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
        own = [name for name in sorted(files) if int((PART.match(name) or [0, 0])[1]) % shares == share]
        for name, found in describe_all((path / name for name in own), progress).items():
            if found != files[name]:
                raise CheckpointBroken(f"{path / name} is damaged: its checksum isn't the manifest's")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointBroken(f"{path} is damaged: {error}") from error


def put_aside(path: Path) -> Path:
    """Rename a broken checkpoint so that it isn't used. Returns its new path."""
    aside = path.with_name(path.name + ".broken")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    return aside


def remove_partials(run_folder: Path, before_term: int) -> None:
    """Remove unfinished checkpoints, step files and reference weights of trainers with terms before `before_term`."""
    for folder, name in UNFINISHED.items():
        for path in (run_folder / folder).glob("*.partial"):
            found = name.fullmatch(path.name)
            if found and int(found[1]) < before_term:
                _remove(path)


def _remove(path: Path) -> None:
    """Remove a file or folder, and ignore errors, because leftovers only take disk space."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def has_room(folder: Path, size: int) -> bool:
    """Return True if a folder's disk has room for `size` bytes, or doesn't report it."""
    try:
        return shutil.disk_usage(folder).free >= size
    except OSError:
        return True


def remove_rotated(run_folder: Path) -> threading.Thread:
    """Start a thread that removes the checkpoints that `rotate` renamed. Returns the thread.

    The next trainer removes what the thread leaves.
    """
    arguments = (run_folder, REMOVED_TERM + 1)
    thread = threading.Thread(target=remove_partials, args=arguments, name="remove-checkpoints")
    thread.start()
    return thread


def keep(path: Path) -> None:
    """Mark a checkpoint as never to be removed. Raises OSError."""
    (path / KEPT).touch()
    sync(path)


def oldest_kept(run_folder: Path, keep: int, max_bytes: int = 0, protected: Collection[int] = ()) -> int | None:
    """Return the step of the oldest checkpoint that may be needed to restore the weights; None if there are too few.

    Normally it is the oldest of the newest `keep` checkpoints. If `max_bytes` leaves no room for one more after the
    next, it is the oldest of the newest `keep` that may be removed. Earlier steps are not
    needed, even if newer checkpoints are broken. `protected`: steps whose checkpoints are never removed.
    """
    steps = checkpoint_steps(run_folder)
    if max_bytes and steps and room_for_more(run_folder, max_bytes) < size_of(run_folder, steps[0]):
        removable = (step for step in steps[:keep] if step not in protected and not is_marked(run_folder, step))
        return min(removable, default=steps[0])
    return steps[keep - 1] if len(steps) >= keep else None


def rotate(run_folder: Path, keep: int, max_bytes: int = 0, protected: Collection[int] = ()) -> int | None:
    """Rename the checkpoints that exceed `keep` or `max_bytes`, for removal by `remove_rotated`.

    The newest, marked and protected checkpoints stay.

    Args:
        run_folder: the folder of the run.
        keep: number of newest checkpoints to keep.
        max_bytes: maximum bytes of the checkpoints and the next one; 0: no limit.
        protected: steps of further checkpoints that stay.

    Returns:
        The result of `oldest_kept` for the checkpoints that stay.
    """
    steps = checkpoint_steps(run_folder)
    old = (step for step in steps[keep:] if step not in protected)
    _remove_later(run_folder, [step for step in old if not is_marked(run_folder, step)])
    if max_bytes:
        _limit(run_folder, keep, max_bytes, protected)
    left = checkpoint_steps(run_folder)[:keep]
    for path in checkpoints_folder(run_folder).glob("step-*.broken"):
        if left and int(path.name.split("-")[1].split(".")[0]) < left[-1]:
            shutil.rmtree(path, ignore_errors=True)
    return oldest_kept(run_folder, keep, max_bytes, protected)


def _limit(run_folder: Path, keep: int, max_bytes: int, protected: Collection[int]) -> None:
    """Rename the oldest checkpoints for removal until the others and the next one fit into `max_bytes`; log it."""
    removed = beyond(run_folder, max_bytes, protected)
    _remove_later(run_folder, removed)
    limit = f"trainer.checkpoint.max_bytes = {max_bytes}"
    if removed:
        steps = ", ".join(map(str, removed))
        logger.warning(
            "the checkpoints of steps %s are removed, though trainer.checkpoint.keep is %d: with them, and the next "
            "one, there would be more than %s",
            steps, keep, limit,
        )  # fmt: skip
    if (room := room_for_more(run_folder, max_bytes)) < 0:
        logger.warning(
            "while the next checkpoint is written, checkpoints take %d bytes more than %s: the newest one stays, and "
            "so do the best one and those that were taken on request. Remove what isn't needed, or raise the limit",
            -room, limit,
        )  # fmt: skip


def _remove_later(run_folder: Path, steps: Iterable[int]) -> None:
    """Rename checkpoints for removal, so that they don't look complete while their files are being removed."""
    for step in steps:
        path = checkpoint_path(run_folder, step)
        os.rename(path, path.with_name(f".{path.name}.{REMOVED_TERM}.partial"))


WEIGHTS_NAME = re.compile(r"step-(\d+)\.(\d+)")
"""Matches the beginning of a reference weights folder's name; groups are step and term. Names of unfinished folders
end with ".partial"."""


def weights_after(plan: Mapping[str, Any]) -> str:
    """Return the name of the reference service's weights after a committed step; "" for the initial weights."""
    if REFERENCE in plan.get("refreshed", ()):
        return f"step-{plan['step']:06d}.{plan['term']}"
    return str(plan.get("reference", ""))


def weights_path(run_folder: Path, name: str) -> Path:
    """Return the path of the reference weights folder `name`."""
    return run_folder / REFERENCE_FOLDER / name


def sync_weights(folder: Path) -> None:
    """Wait until all files of a folder of weights are on disk. Raises OSError."""
    for path in (*folder.iterdir(), folder, folder.parent):
        sync(path)


def remove_older(run_folder: Path, name: str, kept: str) -> None:
    """Remove the folders of reference weights older than folder `name`, except folder `kept`. Raises OSError.

    So a trainer that was replaced doesn't remove its successor's weights.
    """
    for path in (run_folder / REFERENCE_FOLDER).iterdir():
        if (
            path.name != kept
            and (found := WEIGHTS_NAME.match(path.name))
            and _age(found) < _age(WEIGHTS_NAME.match(name))
        ):
            shutil.rmtree(path)


def _age(name: re.Match[str] | None) -> tuple[int, int]:
    assert name is not None
    return int(name[1]), int(name[2])
