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
"""File with the run's resolved configuration, defaults included; config.toml is the configuration as written."""
RECORD = "run.json"
"""File with the coordinator's record of the run: phase, outcome, times, configuration."""
STACK = "stack"
"""File with the identity of the stack that works on the run, or did last. The coordinator locks it during the run."""
LEDGER = "ledger.jsonl"
"""JSONL file with one line per committed step: its record and plan."""
GROUPS = "groups.jsonl"
"""JSONL file with one line per finished group: the step that trained it, or the reason why it was dropped."""
WEIGHTS = "weights.jsonl"
"""JSONL file with one line per version of the weights sent to engines: its digest, which samples' receipts name."""
CURRICULUM = "curriculum.bin"
"""File with the prompts' pass rates (relaxd.data.curriculum.run_curriculum), so that groups.jsonl needn't be read from
its beginning."""
COMPARED = "compared.bin"
"""File with hashes of visited prompts of large data files, so that these needn't be read again to find duplicates
(data.deduplicate); see relaxd.data.duplicates."""
VISITED_MEDIA = "media.bin"
"""File with hashes of visited prompts' media, by which changed media files are detected; see relaxd.data.dataset."""
METRICS = "metrics.jsonl"
"""JSONL file with the metrics of each step, and of an evaluation before the first step, if any."""
SAMPLES = "samples.jsonl"
"""JSONL file with samples that steps trained on, oldest first."""
ALL_SAMPLES = "samples"
"""Folder with one file per step that has all its samples (telemetry.all_samples)."""
SUMMARY = "summary.json"
"""File with the run's results, written when the run ends."""
CODE = "code.json"
"""File with the version of relaxd's code that executes the run."""
LOGS = "logs"
"""Folder with the log files of services that were started for this run."""
TRACES = "traces"
"""Folder with the trace spans of each process, written if telemetry.traces = "file"."""
PROFILES = "profiles"
"""Folder with traces of torch's profiler, and snapshots of GPU memory (docs/profiling.md)."""
STEPS = "steps"
"""Folder with the step files: columns and plan of each committed step."""
CHECKPOINTS = "checkpoints"
"""Folder with the trainer's checkpoints by step; services/trainer/loop/checkpoint_folders.py describes their
contents."""
CHECKPOINT_STATE = "state.json"
"""Name of the file in a checkpoint that has the step, ledger, data cursor and configuration."""
KEPT = "kept"
"""Name of an empty file that marks a checkpoint as permanent: relaxd never removes the checkpoint."""
CHECKPOINT_NAME = re.compile(r"step-(\d{6,})")
"""Pattern of the folder name of a complete checkpoint, with the step's number."""
MODELS = "models"
"""Folder with the models exported during the run (trainer.checkpoint.export_every), by step."""
EVALUATIONS = "evaluations"
"""Folder with evaluations' answers: step-N.jsonl for the held-out prompts, SET/step-N.jsonl for other sets."""
HELD_OUT = "held_out"
"""Name of the evaluation set of prompts that are held out from the training data (eval.prompts)."""
BLOCK_BYTES = 64 * 1024


def answers_file(folder: Path, name: str, step: int) -> Path:
    """Return the path of the file with the answers of the evaluation after `step` on the set `name`."""
    return answers_folder(folder, name) / f"step-{step:06d}.jsonl"


def answers_folder(folder: Path, name: str) -> Path:
    """Return the path of the folder with all evaluations' answers on the set `name`."""
    return folder / EVALUATIONS / ("" if name == HELD_OUT else name)


def all_samples_file(folder: Path, step: int) -> Path:
    """Return the path of the file with all samples of a step: JSON lines, compressed by gzip."""
    return folder / ALL_SAMPLES / f"step-{step:06d}.jsonl.gz"


def critic_folder(folder: Path) -> Path:
    """Return the critic service's folder in a run's folder. Its checkpoints are of the same steps as the trainer's."""
    return folder / "critic"


def checkpoints_folder(folder: Path) -> Path:
    """Return the path of the folder with the checkpoints of a run, or of its critic service."""
    return folder / CHECKPOINTS


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of a step's checkpoint."""
    return checkpoints_folder(folder) / f"step-{step:06d}"


def model_path(folder: Path, step: int) -> Path:
    """Return the path of the model exported after a step."""
    return folder / MODELS / f"step-{step:06d}"


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of which a run's folder has a complete checkpoint, newest first."""
    checkpoints = checkpoints_folder(folder)
    found = (CHECKPOINT_NAME.fullmatch(path.name) for path in checkpoints.iterdir()) if checkpoints.is_dir() else ()
    return sorted((int(match[1]) for match in found if match), reverse=True)


def step_files(folder: Path) -> dict[int, Path]:
    """Return the paths of the step files in a run's folder, by step."""
    return {int(path.stem.removeprefix("step-")): path for path in (folder / STEPS).glob("step-*.safetensors")}


def holds_run(folder: Path) -> bool:
    """Return True if a folder contains a run's record, metrics or step files."""
    return any((folder / name).exists() for name in (RECORD, METRICS, STEPS))


def use_of(folder: Path) -> str:
    """Return why a new run can't use a folder, "" if it can: a coordinator works on a run there, or an earlier run has
    files in it."""
    holder = holder_of(folder)
    return earlier_use_of(folder) if holder is None else held_use_of(folder, holder)


def held_use_of(folder: Path, holder: str) -> str:
    """Return the error message for a folder whose run another stack's coordinator works on."""
    who = f"stack {holder}" if holder else "the coordinator of a stack without a name"
    return f"{folder} is in use: {who} works on its run; choose another run id"


def earlier_use_of(folder: Path) -> str:
    """Return the error message if a folder contains an earlier run, else ""."""
    if not holds_run(folder):
        return ""
    return f"{folder} contains an earlier run: choose another run id, or move its files away"


def is_run(folder: Path) -> bool:
    """Return True if a folder is that of a run that has begun: it has run.json and config.json."""
    try:
        return (folder / RECORD).is_file() and (folder / CONFIG).is_file()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise


def begin_time(folder: Path) -> datetime | None:
    """Return the time at which a folder's run began or was last restored; None if the folder has no run."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return datetime.fromisoformat(record["begin_time"]) if is_run(folder) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content atomically: readers see either the old or the new content. Raises OSError."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(temporary, path)


def append_whole(file: io.FileIO, data: bytes) -> int:
    """Append all of `data` to an unbuffered file, or nothing if the disk is full.

    Returns the offset of the data's end. Raises OSError. Keeps data that another process appends at the same time.
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
    """Append lines to a JSONL file: all, or none if the disk is full. Returns the offset of their end.

    If the file's last line is incomplete, a line feed ends it first; readers skip such a line. Raises OSError.
    """
    with path.open("ab+", buffering=0) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        line_feed = b"" if file.read(1) in (b"", b"\n") else b"\n"
        return append_whole(file, line_feed + text.encode())


def closed_groups(folder: Path, start: int = 0, after: str = "") -> Iterator[dict[str, Any]]:
    """Yield the lines of groups.jsonl (finished groups), oldest first, without repeated groups.

    A replaced coordinator that doesn't know it yet appends the same entries as its successor. Both append all entries
    in order, so a line is new if its entry is higher than those of all earlier lines.

    Args:
        folder: the run's folder.
        start: offset in bytes of the line at which to begin.
        after: the highest entry before `start`.
    """
    highest = _order(after)
    for line in read_lines(folder / GROUPS, start):
        order = _order(line.get("entry"))
        if order is None or highest is None or order > highest:
            yield line
            highest = order or highest


def _order(entry: object) -> tuple[int, int] | None:
    """Return the sort key of a stream entry's id, "MILLISECONDS-NUMBER"; None for another value."""
    milliseconds, _, number = str(entry).partition("-")
    return (int(milliseconds), int(number)) if milliseconds.isdecimal() and number.isdecimal() else None


def newest_samples(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the trained samples in samples.jsonl, newest first. A sample that two coordinators appended is yielded
    once."""
    seen: set[str] = set()
    for line in newest_lines(folder / SAMPLES):
        entry = line.get("entry")
        if entry is None or entry not in seen:
            yield line
        if entry is not None:
            seen.add(entry)


def read_all_samples(folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield all samples of a step, in the order of its groups; nothing if the run didn't store all samples."""
    with contextlib.suppress(FileNotFoundError), gzip.open(all_samples_file(folder, step)) as file:
        yield from map(json.loads, file)


def read_lines(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, oldest first; nothing if the file is missing. Skips incomplete lines.

    `start` is the offset in bytes of the line at which to begin.
    """
    if path.is_file():
        with path.open("rb") as file:
            file.seek(start)
            for line in file:
                if (value := parse_line(line)) is not None:
                    yield value


def newest_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file, newest first. Reads the file backwards, only as far as the caller iterates."""
    return (value for _, value in newest_lines_with_ends(path))


def newest_lines_with_ends(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (end, object) for the lines of a JSONL file, newest first; `end` is the offset after the line's line
    feed."""
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
    """Return the object on a line of a JSONL file; None for an empty or incomplete line."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def holder_of(folder: Path) -> str | None:
    """Return the identity of the stack whose coordinator works on a folder's run now; None if there is none."""
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
"""Name of the file in a fork's folder with recomputed rewards, one line per group, if the fork has another reward."""
EFFECTIVE_SIZE = "policy_drift_ess"
"""Name of the metric that says how well a fork's recorded answers fit its policy: 1 if the policy wrote them, less the
further it has moved."""
COMPARED_METRICS = ("reward_mean", "loss", "grad_norm", "entropy", EFFECTIVE_SIZE, "clip_fraction", "lr")
"""Names of the metrics of a fork that are shown beside the original run's."""

OF_ORIGINAL = " of original"
"""Suffix of the names of the original run's metrics, where they are shown with the fork's."""


@dataclass(frozen=True)
class Fork:
    """Which run a fork was made from, and what was changed."""

    run_id: str
    """Id of the original run."""
    folder: str
    """Path of the original run's folder."""
    step: int
    """Step of the original run after which the fork's initial weights were taken."""
    settings: tuple[str, ...] = ()
    """Settings in which the fork differs from the original run, each as NAME=VALUE."""


def write_fork(folder: Path, fork: Fork) -> None:
    """Write into a fork's folder which run it was made from (fork.json). Raises OSError."""
    replace_file(folder / FORK, json.dumps(asdict(fork), indent=2) + "\n")


def read_fork(folder: Path) -> Fork | None:
    """Return which run a folder's run was forked from; None if it isn't a fork."""
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
