"""A run's folder: the names of its files, appending and reading its JSON lines while they grow, and a fork's origin."""

import contextlib
import errno
import fcntl
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

CONFIG = "config.json"
"""The resolved configuration; config.toml is the original."""
RECORD = "run.json"
"""The coordinator's record of the run."""
STACK = "stack"
"""Identity of the stack that works on the run, or worked on it last; locked by its coordinator during the run."""
LEDGER = "ledger.jsonl"
"""One line per committed step, with its plan."""
GROUPS = "groups.jsonl"
"""One line per closed group: the step that trained it, or the reason of its drop."""
WEIGHTS = "weights.jsonl"
"""One line per version that was sent: its digest, which the receipts of samples name."""
CURRICULUM = "curriculum.bin"
"""Pass rates of prompts (relaxd.data.curriculum.run_curriculum), so that GROUPS needn't be read from its beginning."""
COMPARED = "compared.bin"
"""Hashes of visited prompts of large files (data.deduplicate), which save reading them again; see
relaxd.data.duplicates."""
VISITED_MEDIA = "media.bin"
"""Hashes of the media of visited prompts, which reveal changed files; see relaxd.data.dataset."""
METRICS = "metrics.jsonl"
"""One line per step, and one for an evaluation before the first step."""
SAMPLES = "samples.jsonl"
"""Trained samples, oldest first."""
ALL_SAMPLES = "samples"
"""All samples of each step (telemetry.all_samples), one file per step."""
SUMMARY = "summary.json"
"""The results, written at the end of the run."""
CODE = "code.json"
"""Version of the code that the run is made with."""
LOGS = "logs"
"""Logs of services that were started for this run."""
TRACES = "traces"
"""Spans of each process (telemetry.traces = "file")."""
PROFILES = "profiles"
"""Traces of torch's profiler, and snapshots of GPU memory (docs/profiling.md)."""
STEPS = "steps"
"""Step files."""
CHECKPOINTS = "checkpoints"
"""The trainer's checkpoints by step; services/trainer/loop/checkpoint_folders.py describes their contents."""
CHECKPOINT_STATE = "state.json"
"""File in a checkpoint with step, ledger, data cursor and configuration."""
KEPT = "kept"
"""Empty file in a checkpoint that is never removed."""
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
"""Name of a complete checkpoint."""
MODELS = "models"
"""Models exported during the run (trainer.checkpoint.export_every), by step."""
EVALUATIONS = "evaluations"
"""Answers of evaluations: step-N.jsonl for the held-out prompts, SET/step-N.jsonl for other sets."""
HELD_OUT = "held_out"
"""Name of the set of held-out prompts of the data source (eval.prompts)."""
BLOCK_BYTES = 64 * 1024


def answers_file(folder: Path, name: str, step: int) -> Path:
    """Return the file with the answers to an evaluation set's prompts after a step."""
    return answers_folder(folder, name) / f"step-{step:06d}.jsonl"


def answers_folder(folder: Path, name: str) -> Path:
    """Return the folder with the answers to an evaluation set's prompts."""
    return folder / EVALUATIONS / ("" if name == HELD_OUT else name)


def all_samples_file(folder: Path, step: int) -> Path:
    """Return the file with all samples of a step: JSON lines, compressed by gzip."""
    return folder / ALL_SAMPLES / f"step-{step:06d}.jsonl.gz"


def critic_folder(folder: Path) -> Path:
    """Return a critic service's folder in a run's folder. Its checkpoints are of the same steps as the trainer's."""
    return folder / "critic"


def checkpoints_folder(folder: Path) -> Path:
    """Return the folder of the checkpoints of a run, or of its critic service."""
    return folder / CHECKPOINTS


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return checkpoints_folder(folder) / f"step-{step:06d}"


def model_path(folder: Path, step: int) -> Path:
    """Return the path of the model exported after a step."""
    return folder / MODELS / f"step-{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints, newest first."""
    checkpoints = checkpoints_folder(folder)
    found = (CHECKPOINT_NAME.fullmatch(path.name) for path in checkpoints.iterdir()) if checkpoints.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def step_files(folder: Path) -> dict[int, Path]:
    """Return the step files in a run's folder, by step."""
    return {int(path.stem.removeprefix("step-")): path for path in (folder / STEPS).glob("step-*.safetensors")}


def holds_run(folder: Path) -> bool:
    """Return whether this folder has a run's record or results."""
    return any((folder / name).exists() for name in (RECORD, METRICS, STEPS))


def use_of(folder: Path) -> str:
    """Return the reason why a new run can't use this folder: a run in progress, with its stack, or an earlier one; ""
    if it can."""
    holder = holder_of(folder)
    return earlier_use_of(folder) if holder is None else held_use_of(folder, holder)


def held_use_of(folder: Path, holder: str) -> str:
    """Return the error that a stack's coordinator holds this folder."""
    who = f"stack {holder}" if holder else "the coordinator of a stack without a name"
    return f"{folder} is in use: {who} works on its run; choose another run id"


def earlier_use_of(folder: Path) -> str:
    """Return the error that this folder has an earlier run; "" if it has none."""
    if not holds_run(folder):
        return ""
    return f"{folder} contains an earlier run: choose another run id, or move its files away"


def is_run(folder: Path) -> bool:
    """Return whether this is the folder of a run that has begun."""
    try:
        return (folder / RECORD).is_file() and (folder / CONFIG).is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def begin_time(folder: Path) -> datetime | None:
    """Return when the run of this folder began, or was restored last; None if the folder has no run."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return datetime.fromisoformat(record["begin_time"]) if is_run(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole or not at all: readers see either the old or the new content. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def append_whole(file: io.FileIO, data: bytes) -> int:
    """Append to an unbuffered file: all of `data`, or nothing if the disk is full.

    Raises OSError. Returns the offset of the data's end. Data that another process appends meanwhile stays.
    """
    start = file.seek(0, os.SEEK_END)
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        if file.seek(0, os.SEEK_END) == start + len(data) - len(rest):  # else others' lines follow
            file.truncate(start)
        raise
    return file.tell()


def append_lines(path: Path, text: str) -> int:
    """Append lines to a file like `append_whole`. An incomplete last line is ended first, and readers skip it."""
    with path.open("ab+", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        line_feed = b"" if file.read(1) in (b"", b"\n") else b"\n"
        return append_whole(file, line_feed + text.encode())


def closed_groups(folder: Path, start: int = 0, after: str = "") -> Iterator[dict[str, Any]]:
    """Yield the lines of GROUPS, oldest first, without repeated entries.

    A replaced coordinator that doesn't know it yet appends the same entries as its successor. Both append in order and
    leave no entry out, so a line is new if its entry is higher than all before it.

    Args:
        folder: the run's folder.
        start: the byte at which to begin: the start of a line.
        after: the highest entry before `start`.
    """
    highest = _order(after)
    for line in read_lines(folder / GROUPS, start):
        order = _order(line.get("entry"))
        if order is None or highest is None or order > highest:
            yield line
            highest = order or highest


def _order(entry: object) -> tuple[int, int] | None:
    """Return the sort key of an entry; None for a line that isn't one."""
    milliseconds, _, number = str(entry).partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdecimal() and number.isdecimal() else None


def newest_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of SAMPLES, newest first, each sample once, because two coordinators may have appended it."""
    seen: set[str] = set()
    for line in newest_lines(folder / SAMPLES):
        entry = line.get("entry")
        if entry is None or entry not in seen:
            yield line
        if entry is not None:
            seen.add(entry)


def read_all_samples(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield all samples of a step, in the order of its groups; nothing if they were not stored."""
    with contextlib.suppress(FileNotFoundError), gzip.open(all_samples_file(folder, step)) as file:
        yield from map(json.loads, file)


def read_lines(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, oldest first; nothing if there is no file. Skips an incomplete last line.

    `start` is the byte at which to begin: the start of a line.
    """
    if path.is_file():
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if (value := parse_line(line)) is not None:
                    yield value


def newest_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Like `read_lines`, but newest first, reading no more of the file than is consumed."""
    return (value for _, value in newest_lines_with_ends(path))


def newest_lines_with_ends(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like `newest_lines`, each with the offset of its end, line feed included."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        start = end = file.seek(0, os.SEEK_END)
        line_feed = 0  # what follows the last one is no line
        pending: list[bytes] = []  # the blocks of a line whose beginning has not been read, last one first
        while start:
            size = min(BLOCK_BYTES, start)
            start = file.seek(start - size)
            first, *others = file.read(size).split(b"\n")
            if others:
                others[-1] += b"".join(reversed(pending))
                pending = []
                for line in reversed(others):
                    if (value := parse_line(line)) is not None:
                        yield end, value
                    end -= len(line) + line_feed
                    line_feed = 1
            pending.append(first)
        if (value := parse_line(b"".join(reversed(pending)))) is not None:
            yield end, value


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Parse a line. Returns None for an empty or incomplete one."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def holder_of(folder: Path) -> str | None:
    """Return the identity of the stack whose coordinator holds a run's folder; None if none does."""
    try:
        with (folder / STACK).open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
    except OSError:  # it has no such file, or its file system no locks
        return None
    return None


FORK = "fork.json"
"""Name of the file in a fork's folder that describes the original run."""
REWARDS = "rewards.jsonl"
"""File in a fork's folder with new reward columns, one line per group, if the fork has another reward."""
EFFECTIVE_SIZE = "policy_drift_ess"
"""Metric of the distance between recorded answers and the policy: 1 for the policy's own answers."""
COMPARED_METRICS = ("reward_mean", "loss", "grad_norm", "entropy", EFFECTIVE_SIZE, "clip_fraction", "lr")
"""Metrics to compare with the original's."""

OF_ORIGINAL = " of original"
"""Suffix of the names of the original run's metrics."""


@dataclass(frozen=True)
class Fork:
    """The origin of a fork."""

    run_id: str
    """The original run."""
    folder: str
    """Folder of the original run."""
    step: int
    """Step of the original run after which the weights were taken."""
    settings: tuple[str, ...] = ()
    """The changed settings, each as NAME=VALUE."""


def write_fork(folder: Path, fork: Fork) -> None:
    """Write the origin of a fork into its folder. Raises OSError."""
    replace_file(folder / FORK, json.dumps(asdict(fork), indent=2) + "\n")


def read_fork(folder: Path) -> Fork | None:
    """Return the origin of a run; None if it isn't a fork."""
    try:
        found = json.loads((folder / FORK).read_text(encoding="utf-8"))
        return Fork(**found | {"settings": tuple(found["settings"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def with_original(folder: Path, lines: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield lines of a run's metrics; in a fork's lines add the original run's metrics, such as "loss of original"."""
    fork = read_fork(folder)
    originals = {} if fork is None else {line.get("step"): line for line in read_lines(Path(fork.folder) / METRICS)}
    for line in lines:
        original = originals.get(line.get("step"), {})
        yield {**line, **{f"{name}{OF_ORIGINAL}": original[name] for name in COMPARED_METRICS if name in original}}
