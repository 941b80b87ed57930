"""ledger.jsonl and metrics.jsonl: a run's files with one line per step, written by one coordinator at a time."""

import contextlib
import io
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from relaxd.board import LedgerEntry, LedgerTrimmed
from relaxd.board.committed_steps import ReadLedger
from relaxd.run_folder import append_whole, newest_lines_with_ends, read_lines
from services.coordinator.state.records import Evaluation

logger = logging.getLogger(__name__)

LEFTOVER_SECONDS = 3600.0
"""Seconds without a write after which a temporary file belongs to a dead coordinator."""

Check = Callable[[], None]
"""Function that raises Superseded if a newer coordinator has taken over."""


class AppendedFile:
    """A file that stays open for appending.

    A coordinator that takes the file over puts a copy in its place. A replaced coordinator that has not noticed yet
    keeps appending to its open file, which is no longer read. So no lock is needed, and a stopped coordinator blocks no
    other.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.FileIO | None = None

    def replace(self, parts: Iterable[bytes], check: Check) -> None:
        """Write a new file with this content and put it in the old one's place; later appends go to the new file.
        Raises what `check` raises.

        After an error the old file is still in place and open, so the call may be repeated or skipped.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # In containers both coordinators may have the same process id.
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        file = temporary.open("wb", buffering=0)
        try:
            for part in parts:
                append_whole(file, part)
            check()
            os.replace(temporary, self._path)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._file = file

    def remove_leftovers(self) -> None:
        """Remove the temporary files of coordinators that died while writing them."""
        for path in self._path.parent.glob(f"{self._path.name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # another coordinator has removed it
                if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                    path.unlink()

    def append(self, parts: Iterable[bytes]) -> None:
        """Append the parts to the file, all or none. Raises OSError."""
        assert self._file is not None, "replace comes first"
        append_whole(self._file, b"".join(parts))

    def sync(self) -> None:
        """Wait until the file is on disk. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


PAGE = 256
"""Maximum number of new steps in one read of the ledger."""
COPIED_BYTES = 1 << 20
Identity = tuple[int, int, float]
"""`LedgerEntry.identity`: step, trainer term and time of the commit. Terms begin at 1; term 0 means that the commit is
unknown."""


class LedgerFile(AppendedFile):
    """Keeps ledger.jsonl equal to the board's ledger.

    Redis may lose its newest writes, and a step may then be committed again with other groups. So each read of the
    ledger begins with the file's last step, and lines that aren't in the ledger are replaced.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._check: Check = lambda: None
        self._last: Identity = (0, 0, 0.0)
        self.rewound_to: int | None = None
        """Step after which lines were replaced; the reader resets it to None."""

    @property
    def last_step(self) -> int:
        """Number of the last step in ledger.jsonl; 0 without steps."""
        return self._last[0]

    def take_over(self, read: ReadLedger, check: Check) -> int:
        """Take ledger.jsonl over from an earlier coordinator, and bring it up to date with the board's ledger. `check`
        is called before the file is replaced, now and later.

        Returns the last step that both the file and the ledger had before.
        """
        self._check = check
        self.remove_leftovers()
        self._rewind(read)
        self.rewound_to = None
        kept = self.last_step
        while self.follow(read):
            pass
        return kept

    def follow(self, read: ReadLedger) -> list[LedgerEntry]:
        """Remove the file's lines that the board's ledger lacks, then append and return at most PAGE new steps.

        If `read` raises, the call can be repeated.
        """
        before = 1 if self._last[1] else 0
        try:
            entries = read(self.last_step - before, PAGE + before)
        except LedgerTrimmed as error:
            logger.error(
                "%s ends at step %d, but the board's ledger begins at step %d: the steps between are lost",
                *(self._path, self.last_step, error.first),
            )
            self._last, before = (error.first - 1, 0, 0.0), 0
            entries = read(self.last_step, PAGE)
        if before and (not entries or entries[0].identity != self._last):
            self._rewind(read)
            self.rewound_to = self.last_step
            entries = read(self.last_step, PAGE)
        elif before:
            entries = entries[1:]
        if entries:
            self.append([json.dumps(asdict(entry)).encode() + b"\n" for entry in entries])
            self._last = entries[-1].identity
        return entries

    def _rewind(self, read: ReadLedger) -> None:
        """Replace ledger.jsonl by its lines up to the last one that is also in the board's ledger."""
        end, last = 0, (0, 0, 0.0)
        for found_end, line in newest_lines_with_ends(self._path):
            found = (line.get("step", 0), line.get("term", 0), line.get("time", 0.0))
            try:
                same = found[0] and [entry.identity for entry in read(found[0] - 1, 1)] == [found]
            except LedgerTrimmed:  # it was trimmed because it is in the file
                end, last = found_end, (found[0], 0, 0.0)
                break
            if same:
                end, last = found_end, found
                break
        if not end:
            self.replace((), self._check)
        else:
            with self._path.open("rb") as file:
                self.replace(_lines_until(file, end), self._check)
        self._last = last


def _lines_until(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield a file's bytes before offset `end`, in parts, and a line feed if the last line lacks one."""
    last = b""
    while end > 0 and (part := file.read(min(COPIED_BYTES, end))):
        yield part
        last, end = part, end - len(part)
    if not last.endswith(b"\n"):
        yield b"\n"


Steps = Iterable[tuple[int, Mapping[str, Any]]]
"""Steps in order, each with its metrics."""


class MetricsFile:
    """metrics.jsonl: one line per step, and one for an evaluation of the initial model (step 0).

    Only this file has the coordinator's own measurements, so existing lines are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendedFile(path)
        self._check: Check = lambda: None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._writing = threading.Lock()  # an evaluation may end beside training
        self.last_step = 0
        """Number of the last step in metrics.jsonl."""

    def take_over(
        self, read: ReadLedger, check: Check, kept: int, last_step: int, evaluations: Iterable[Evaluation]
    ) -> None:
        """Take metrics.jsonl over from an earlier coordinator, with its lines up to step `kept`. Missing lines come
        from the ledger.

        `check` is called before the file is replaced, now and later.
        """
        self._check = check
        self._file.remove_leftovers()
        self._evaluations = {evaluation.step: evaluation.metrics for evaluation in evaluations}
        self._rewrite(read, kept, last_step)

    def rewind(self, last_step: int) -> None:
        """Remove the lines after `last_step`: Redis lost these steps, or they are committed again."""
        if last_step < self.last_step:
            self._rewrite(lambda after, limit: [], last_step, last_step)

    def append(self, steps: Steps) -> None:
        """Append the lines of steps to metrics.jsonl, all or none. Raises OSError; the call can then be repeated."""
        with self._writing:
            steps = list(steps)
            self._file.append(self._line(step, metrics) for step, metrics in steps)
            self.last_step = max((step for step, _ in steps), default=self.last_step)

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation's metrics to its step's line in metrics.jsonl, or keep them for the line if it isn't there
        yet."""
        self._evaluations[evaluation.step] = evaluation.metrics
        if evaluation.step <= self.last_step:
            with self._writing:
                self._file.replace(self._lines_with(evaluation.step), self._check)

    def close(self) -> None:
        """Close metrics.jsonl."""
        self._file.close()

    def _rewrite(self, read: ReadLedger, kept: int, last_step: int) -> None:
        with self._writing:
            self._file.replace(self._lines(read, kept, last_step), self._check)
            self.last_step = last_step

    def _lines_with(self, step: int) -> Iterator[bytes]:
        """Yield all lines of the file, adding the evaluation's metrics to this step's line. Only that line is decoded:
        decoding all would take seconds."""
        beginning = json_line({"step": step})[:-2]
        with self._path.open("rb") as file:
            lines = iter(file)
            if step == 0:
                first = next(lines, b"")
                if _begins(first, beginning):
                    yield self._line(0, json.loads(first))
                else:
                    yield self._line(0, {})
                    yield first
            for line in lines:
                yield self._line(step, json.loads(line)) if _begins(line, beginning) else line

    def _lines(self, read: ReadLedger, kept: int, last_step: int) -> Iterator[bytes]:
        """Yield the lines of all steps up to `last_step`, in order. Lines up to step `kept` come from the file, later
        and missing ones from the ledger."""
        done = 0
        start = {}
        for line in read_lines(self._path):
            step = line.get("step")
            if step == 0 and not done:
                start = line
            elif isinstance(step, int) and done < step <= kept:
                if not done and (start or 0 in self._evaluations):
                    yield self._line(0, start)
                yield from self._missing(read, done, step - 1)
                yield self._line(step, line)
                done = step
        if not done and (start or 0 in self._evaluations):
            yield self._line(0, start)
        yield from self._missing(read, done, last_step)

    def _missing(self, read: ReadLedger, after: int, until: int) -> Iterator[bytes]:
        """Yield lines for the steps from `after` + 1 to `until`, with the metrics in the ledger."""
        while after < until:
            try:
                entries = read(after, min(PAGE, until - after))
            except LedgerTrimmed as trimmed:  # the steps between are lost: ledger.jsonl lacks them, too
                after = trimmed.first - 1
                continue
            if not entries:
                return
            for entry in entries:
                yield self._line(entry.step, entry.metrics)
            after = entries[-1].step

    def _line(self, step: int, metrics: Mapping[str, Any]) -> bytes:
        return json_line({"step": step, **metrics, **self._evaluations.get(step, {})})


def _begins(line: bytes, beginning: bytes) -> bool:
    """Return True if a line starts with `beginning`, and the step's number ends there, too: the line of step 12 doesn't
    match step 1."""
    return line.startswith(beginning) and line[len(beginning) :][:1] in (b",", b"}")


def json_line(values: Mapping[str, Any]) -> bytes:
    """Return values as a line of JSON, with null for NaN and infinity."""
    return json.dumps(finite(values)).encode() + b"\n"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON lacks, by null."""
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
