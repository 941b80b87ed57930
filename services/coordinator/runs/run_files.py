"""The coordinator's files in a run's folder.

run.json and ledger.jsonl are copies of records in Redis. With them and the trainer's checkpoints and step files, a run
survives the loss of all Redis data (see `restoring`).
"""

import fcntl
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any, TextIO

from relaxd import __version__
from relaxd.board import Counts, LedgerEntry
from relaxd.board.committed_steps import CommittedSteps, ReadLedger
from relaxd.board.types import GroupOutcome
from relaxd.config import RunConfig
from relaxd.config.write_toml import dump
from relaxd.evaluation.estimates import is_estimate
from relaxd.run_folder import (
    CODE,
    CONFIG,
    GROUPS,
    LEDGER,
    METRICS,
    RECORD,
    SAMPLES,
    STACK,
    SUMMARY,
    WEIGHTS,
    answers_file,
    append_lines,
    newest_lines_with_ends,
    read_lines,
    replace_file,
)
from services.coordinator.runs.line_files import PAGE, Check, LedgerFile, MetricsFile, finite, json_line
from services.coordinator.state.records import Evaluation, RunRecord

GIT_SECONDS = 5.0
LOCK_SECONDS = 0.4
"""Maximum seconds to get the lock on a run's folder, which readers hold only for a moment."""
LOCK_AGAIN_SECONDS = 0.5
"""Seconds between two attempts to lock the folder while a predecessor holds it."""


@cache
def code_version() -> dict[str, Any]:
    """Return the versions of relaxd and Python; in a git checkout also its commit and whether files were changed."""
    version: dict[str, Any] = {"relaxd": __version__, "python": platform.python_version()}
    root = Path(__file__).parents[3]
    if (root / ".git").exists() and (commit := _git(root, "rev-parse", "HEAD")) is not None:
        changes = _git(root, "status", "--porcelain", "--untracked-files=no")
        version |= {"commit": commit, "uncommitted_changes": changes != ""}
    return version


def _git(root: Path, *words: str) -> str | None:
    """Return the output of a git command; None without git, or if it fails or hangs."""
    command = ["git", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


_log = logging.getLogger(__name__)

NO_REWARDS = ("eval_response_length", "eval_truncated_share", "eval_prompts", "eval_unscored")
"""Names of an evaluation's metrics other than the reward and its parts."""

KeepLines = Callable[[str, Sequence[Mapping[str, Any]]], None]
"""Function (set name, lines) that stores lines about evaluation answers. Called in threads, in the order in which
prompts finish."""


class RunFiles:
    """The files of one run.

    config.json, config.toml, code.json, run.json, ledger.jsonl, groups.jsonl, weights.jsonl, curriculum.bin,
    compared.bin, metrics.jsonl, samples.jsonl, summary.json, evaluations/step-N.jsonl, evaluations/SET/step-N.jsonl.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = LedgerFile(folder / LEDGER)
        self.metrics = MetricsFile(folder / METRICS)
        self._kept = sys.maxsize
        """The last step on which ledger.jsonl and the board's ledger agreed when the folder was taken over."""
        self._sent: set[tuple[int, str]] | None = None
        """Versions, each with a digest of its weights, in weights.jsonl; None before the file was read."""
        self._check: Check = lambda: None

    @property
    def last_step(self) -> int:
        """Number of the last step in metrics.jsonl, once the folder was taken over."""
        return self.metrics.last_step

    def create(self, config_toml: str, config: RunConfig) -> None:
        """Create the folder and write the configuration and the version of the code. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(config_toml)
        (self.folder / CONFIG).write_text(config.model_dump_json(indent=2) + "\n")
        (self.folder / CODE).write_text(json.dumps(code_version(), indent=2) + "\n")

    def write_config(self, config: RunConfig) -> None:
        """Write the configuration of a run that continues with more steps. Raises OSError."""
        replace_file(self.folder / "config.toml", dump(config))
        replace_file(self.folder / CONFIG, config.model_dump_json(indent=2) + "\n")

    def remove_summary(self) -> None:
        """Remove summary.json, because the ended run continues. Raises OSError."""
        (self.folder / SUMMARY).unlink(missing_ok=True)

    def take_over_steps(self, read: ReadLedger, check: Check, evaluations: Iterable[Evaluation]) -> None:
        """Take ledger.jsonl and metrics.jsonl over from an earlier coordinator, and complete them from the board's
        ledger.

        Raises what `read` and `check` raise; the call can then be repeated.
        """
        self._check = check
        self._kept = min(self._kept, self.ledger.take_over(read, check))
        steps = CommittedSteps(read, self.folder)
        self.metrics.take_over(steps, check, self._kept, self.ledger.last_step, evaluations)

    def next_steps(self, read: ReadLedger) -> list[LedgerEntry]:
        """Append the next steps to ledger.jsonl and return them; the caller must append their metrics.

        Steps that the ledger lost or committed again with other groups are first removed from both files.
        """
        entries = self.ledger.follow(read)
        if self.ledger.rewound_to is not None:
            self.metrics.rewind(self.ledger.rewound_to)
            self.ledger.rewound_to = None
        if not entries or entries[0].step != self.last_step + 1:  # the last call was interrupted
            entries = CommittedSteps(read, self.folder)(self.last_step, PAGE)
        return entries

    def step_metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl."""
        return list(read_lines(self.folder / METRICS))

    def close(self) -> None:
        """Close the open files."""
        self.ledger.close()
        self.metrics.close()

    def write_record(self, record: RunRecord) -> None:
        """Write the run's record to run.json."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / RECORD, record.model_dump_json(indent=2) + "\n")

    def append_groups(self, fates: Sequence[GroupOutcome]) -> int:
        """Append outcomes of groups to groups.jsonl, all or none. Returns the file's size afterwards, in bytes.

        Raises OSError; the call can then be repeated, like all writes here.
        """
        lines = [json.dumps(fate.line, separators=(",", ":")) + "\n" for fate in fates]
        return append_lines(self.folder / GROUPS, "".join(lines))

    def append_weights(self, sent: Mapping[int, Sequence[str]]) -> None:
        """Append versions and their weight digests to weights.jsonl, except those already there. Raises OSError."""
        path = self.folder / WEIGHTS
        if self._sent is None:
            self._sent = {(line["version"], line["digest"]) for line in read_lines(path)}
        new = [(version, digest) for version in sorted(sent) for digest in sent[version]]
        new = [one for one in new if one not in self._sent]
        if new:
            lines = (json_line({"version": version, "digest": digest}).decode() for version, digest in new)
            append_lines(path, "".join(lines))
            self._sent.update(new)

    def rewind_samples(self, last_step: int) -> int:
        """Remove the samples of later steps from samples.jsonl, because Redis lost them or the steps are committed
        again.

        Returns the last step in the file. Raises OSError, and what the `check` of `take_over_steps` raises: a replaced
        coordinator removes nothing.
        """
        path = self.folder / SAMPLES
        kept_bytes, step, superseded = 0, 0, False
        for end, line in newest_lines_with_ends(path):
            if line.get("step", 0) <= last_step:
                kept_bytes, step = end, int(line.get("step", 0))
                break
            superseded = True
        if superseded:
            self._check()
            os.truncate(path, kept_bytes)
        return step

    def append_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append samples, oldest first, to samples.jsonl, all or none. Raises OSError."""
        lines = "".join(json.dumps(finite(sample), ensure_ascii=False) + "\n" for sample in samples)
        append_lines(self.folder / SAMPLES, lines)

    @contextmanager
    def answers(self, step: int) -> Iterator[KeepLines]:
        """Yield a function that writes lines about a set's answers, for an evaluation of a step.

        The lines go to temporary files. If the block ends without an error, these become evaluations/step-N.jsonl for
        the held-out prompts and evaluations/SET/step-N.jsonl for other sets.
        """
        with ExitStack() as stack:
            files: dict[str, TextIO] = {}
            lock = threading.Lock()  # prompts of a set are done in several threads

            def keep(name: str, lines: Sequence[Mapping[str, Any]]) -> None:
                with lock:
                    if name not in files:
                        path = answers_file(self.folder, name, step).with_suffix(".tmp")
                        path.parent.mkdir(parents=True, exist_ok=True)
                        stack.callback(path.unlink, missing_ok=True)  # it has another name if all went well
                        files[name] = stack.enter_context(path.open("w", encoding="utf-8"))
                    files[name].write("".join(json_line(line).decode() for line in lines))

            yield keep
            for file in files.values():
                file.close()
                path = Path(file.name)
                os.replace(path, path.with_suffix(".jsonl"))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json."""
        replace_file(self.folder / SUMMARY, json.dumps(finite(summary), indent=2) + "\n")


def summarise(
    record: RunRecord, counts: Counts, model: str, metrics: Sequence[Mapping[str, float]] = ()
) -> dict[str, Any]:
    """Return the content of summary.json. `metrics`: metrics of all steps, needed only for a colocated run."""
    before = next((e.metrics for e in record.evaluations if e.step == 0), {})
    after = next((e.metrics for e in reversed(record.evaluations) if e.step > 0), {})
    assert record.end_time is not None
    return {
        "run_id": record.run_id,
        "state": record.phase.value.lower(),
        "outcome": record.outcome.value.lower() if record.outcome else None,
        "reason": record.reason,
        **_changes(before, after),
        "steps": counts.last_step,
        "wall_seconds": round((record.end_time - record.create_time).total_seconds(), 3),
        "published": counts.published,
        "trained": counts.trained,
        "dropped": counts.dropped,
        "dropped_by_reason": counts.dropped_by_reason,
        "in_flight": counts.open,
        "started": record.create_time.isoformat(),
        "ended": record.end_time.isoformat(),
        "model": model,
        "evaluations": [{"step": e.step, **e.metrics} for e in record.evaluations],
        "notes": list(record.notes),
        **({"switching": switching(metrics)} if metrics else {}),
    }


def _changes(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float | None]:
    """Return reward_before, reward_after and the same values of each part of the reward, for held-out prompts.

    A missing value is None. The result is empty if the run was never evaluated.
    """
    values = [name for name in (*before, *after) if name.startswith("eval_") and name not in NO_REWARDS]
    names = [name for name in (value.removeprefix("eval_") for value in values) if not is_estimate(name)]
    found: dict[str, float | None] = {}
    for name in sorted(set(names), key=lambda name: (name != "reward", name)):
        found |= {f"{name}_before": before.get(f"eval_{name}"), f"{name}_after": after.get(f"eval_{name}")}
    return found


class FolderHeld(Exception):
    """Another coordinator holds a run's folder; `holder` is its stack's identity, empty if it has none."""

    def __init__(self, folder: Path, holder: str) -> None:
        super().__init__(f"{folder} is held by stack {holder!r}")
        self.holder = holder


@contextmanager
def held_folder(folder: Path, stack: str, *, beside: Collection[str] = ()) -> Iterator[None]:
    """Hold a run's folder for a stack inside the context: lock its file STACK, which contains the stack's identity.

    File systems without locks are used without one. Slow if another stack holds the folder: call it from a thread.

    Args:
        folder: the run's folder.
        stack: identity of this stack.
        beside: identities of stacks that may still hold the folder, such as that of a living predecessor; the folder is
            locked once the holder has ended.

    Raises FolderHeld; nothing is changed then.
    """
    with ExitStack() as held:
        try:
            file = held.enter_context((folder / STACK).open("ab+", buffering=0))  # nothing is left to write later
            deadline = time.monotonic() + LOCK_SECONDS
            while not (is_locked := _lock(file, stack)) and time.monotonic() < deadline:
                time.sleep(LOCK_SECONDS / 20)  # brief: deadline
            if not is_locked:
                if (holder := (folder / STACK).read_text().strip()) not in beside:
                    raise FolderHeld(folder, holder)
                held.enter_context(_locking(file, stack))
        except OSError as error:
            _log.info("%s is not locked: %s", folder / STACK, error)
        yield


def _lock(file: IO[bytes], stack: str) -> bool:
    """Lock a file and write a stack's identity into it. Returns False if another process or thread has locked the
    file."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    file.truncate(0)
    file.write(f"{stack}\n".encode())
    return True


@contextmanager
def _locking(file: IO[bytes], stack: str) -> Iterator[None]:
    """Inside the context, a thread repeatedly tries to lock a file with `_lock`, until the file's holder has released
    it."""
    over = threading.Event()

    def lock() -> None:
        while not over.wait(LOCK_AGAIN_SECONDS) and not _lock(file, stack):  # idle: looks again
            pass

    thread = threading.Thread(target=lock, name="lock the run's folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(2 * LOCK_SECONDS)


def switching(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Summarise the GPU handoffs of a colocated run.

    Returns total seconds, their share of all step time, mean seconds per step by part, and the device bytes awake and
    asleep as last reported.
    """
    reported = [metrics for metrics in steps if "switch_seconds" in metrics]
    total = sum(metrics["switch_seconds"] for metrics in reported)
    elapsed = sum(metrics.get("step_seconds", 0.0) for metrics in steps)
    names = sorted({name for metrics in reported for name in metrics if name.startswith("switch_")})
    means = {name: sum(metrics.get(name, 0.0) for metrics in reported) / len(reported) for name in names}
    memory = {
        name: metrics[name]
        for metrics in reported
        for name in metrics
        if name.endswith(("_awake_bytes", "_asleep_bytes"))
    }
    return {"seconds": total, "share": total / elapsed if elapsed else 0.0, **means, **memory}
