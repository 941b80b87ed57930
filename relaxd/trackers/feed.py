"""A thread that feeds one tracker from the files in the run's folder, and the record of its logged steps."""

import contextlib
import io
import json
import math
import os
import re
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from relaxd.importing import describe_error
from relaxd.run_folder import METRICS, SAMPLES, append_lines, parse_line, read_lines
from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, flatten, load_tracker

POLL_SECONDS = 0.5
"""Seconds between two checks of the run's files for new lines."""
RESTART_SECONDS = 30.0
"""Seconds between a tracker's error and its restart."""
SLOW_SECONDS = 60.0
"""Seconds without an answer after which a tracker is reported as stuck."""
FOLDER = "trackers"
"""Subfolder of the run's folder with each tracker's record of logged steps."""

Report = Callable[[str, str], None]
"""Callback that receives a tracker's name and its problem, or "" once the tracker works."""


class TakenBack(Exception):
    """Steps that were logged are gone from the run's files, or have different numbers now."""


class Feed(threading.Thread):
    """Feeds one tracker until `end` is called. Never raises the tracker's errors."""

    def __init__(self, name: str, run: TrackedRun, report: Report, restart_seconds: float = RESTART_SECONDS) -> None:
        super().__init__(name=name, daemon=True)
        self._run = run
        self._report = report
        self._restart_seconds = restart_seconds
        self._ending = threading.Event()
        self._run_ended = False
        self._busy_since: float | None = None
        file = re.sub(r"\W+", "-", name) + ".jsonl"
        self._logged_path = run.folder / FOLDER / file
        self._metrics = FollowedFile(run.folder / METRICS)
        self._samples = FollowedFile(run.folder / SAMPLES)
        self._tracker: Tracker | None = None

    def end(self, *, run_ended: bool) -> None:
        """Tell the thread to log the remaining lines and then to stop."""
        self._run_ended = run_ended
        self._ending.set()

    def check(self) -> None:
        """Report the tracker as stuck if it hasn't answered for SLOW_SECONDS. Called from another thread."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > SLOW_SECONDS:
            self._report(self.name, f"has not answered for more than {SLOW_SECONDS:.0f} s")

    def run(self) -> None:
        """Feed the tracker, and restart it after an error."""
        taken_back = False
        while True:
            try:
                self._busy_since = time.monotonic()
                self._start(taken_back=taken_back)
                self._follow()
                self._close()
                return
            except TakenBack:
                taken_back = True
                self._close()
                continue
            except Exception as error:  # a tracker may raise anything
                taken_back = False
                again = f"; it is started again every {self._restart_seconds:.0f} s"
                self._report(self.name, describe_error(error) + again)
                self._close()
            self._busy_since = None
            if self._ending.wait(self._restart_seconds):  # idle: the problem is reported
                return

    def _start(self, *, taken_back: bool) -> None:
        """Start the tracker where it left off. If logged steps were taken back, begin a new edition."""
        self._tracker = load_tracker(self.name)
        self._logged = Logged(self._logged_path)
        before = self._logged.edition
        resumed = bool(before) and not taken_back and not self._tracker.begins_anew(self._run)
        if not resumed:
            self._logged.begin_edition()
        edition = Edition(self._logged.edition, replaced="" if resumed else before, resumed=resumed)
        self._tracker.start(self._run, edition)

    def _follow(self) -> None:
        """Pass new lines to the tracker until `end` is called. Raises TakenBack, and any error of the tracker."""
        assert self._tracker is not None
        while True:
            ending = self._ending.is_set()  # before reading: what the run wrote until then is read
            self._busy_since = time.monotonic()
            self._read_metrics()
            if self._run.settings["samples"]:
                self._read_samples()
            self._busy_since = None
            self._report(self.name, "")
            if ending:
                return
            self._ending.wait(POLL_SECONDS)  # idle: the run has written nothing new

    def _read_metrics(self) -> None:
        last_step = -1
        from_beginning, lines = self._metrics.read()
        while lines:
            for line in lines:
                step = line.get("step")
                if isinstance(step, int):
                    last_step = step
                    self._log_line(step, line)
            self._flush()
            again, lines = self._metrics.read()
            from_beginning |= again
        if from_beginning and last_step < self._logged.last_step:
            raise TakenBack

    def _log_line(self, step: int, line: Mapping[str, Any]) -> None:
        """Log a line of metrics.jsonl unless it was already logged.

        Raises TakenBack if another line was logged for its step.
        """
        assert self._tracker is not None
        numbers, evaluation = split_line(line)
        logs: tuple[tuple[Part, dict[str, float], Callable[[int, Mapping[str, float]], None]], ...] = (
            ("step", numbers, self._tracker.log_step),
            ("evaluation", evaluation, self._tracker.log_evaluation),
        )
        for part, values, log in logs:
            known, new = self._logged.known(step, part), digest(values)
            if known is None and values:
                log(step, values)
                self._logged.add(step, part, new)
            elif known is not None and known != new:
                raise TakenBack

    def _read_samples(self) -> None:
        step, rows = -1, list[dict[str, Any]]()
        while lines := self._samples.read()[1]:
            for line in lines:
                if line.get("step", -1) != step:
                    self._log_samples(step, rows)
                    step, rows = line.get("step", -1), []
                if line not in rows:  # two coordinators may have appended it
                    rows.append(line)
        self._log_samples(step, rows)
        self._flush()

    def _log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        assert self._tracker is not None
        if rows and self._logged.known(step, "samples") is None:
            shown = ({name: value for name, value in row.items() if name not in ("entry", "step")} for row in rows)
            self._tracker.log_samples(step, list(shown))
            self._logged.add(step, "samples", 0)

    def _flush(self) -> None:
        assert self._tracker is not None
        self._tracker.flush()
        self._logged.save()

    def _close(self) -> None:
        """Close the tracker and the run's files. The files are read from the beginning after a restart."""
        self._metrics.close()
        self._samples.close()
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with contextlib.suppress(Exception):  # what was logged is stored: `flush` came before
                tracker.close(ended=self._run_ended)


def split_line(line: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the training and the evaluation numbers of a line of metrics.jsonl, by the names that trackers show.

    "reward_mean" is "train/reward_mean", "eval_reward" is "eval/reward", "eval/SET/reward" stays as it is, and the
    share of a replica is "train/replicas.busy.ID". Values that aren't finite numbers are left out.
    """
    numbers: dict[str, float] = {}
    evaluation: dict[str, float] = {}
    for name, value in flatten(line).items():
        if name == "step" or isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if name.startswith("eval/"):
            evaluation[name] = value
        elif name.startswith("eval_"):
            evaluation["eval/" + name.removeprefix("eval_")] = value
        else:
            numbers[f"train/{name}"] = value
    return numbers, evaluation


Part = Literal["step", "evaluation", "samples"]


class Logged:
    """Record of what a tracker has logged in an edition: the digest of each step's numbers, and the steps with
    samples."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.edition = ""
        """Id of the newest edition; "" before the first edition."""
        self._digests: dict[tuple[int, Part], int] = {}
        self._unsaved: list[str] = []
        for line in read_lines(path):
            if "edition" in line:
                self.edition, self._digests = line["edition"], {}
            else:
                self._digests[line["step"], line["part"]] = line["digest"]
        self.last_step = max((step for step, _ in self._digests), default=-1)
        """The last step of which anything was logged; -1 if there is none."""

    def begin_edition(self) -> None:
        """Begin a new edition, in which nothing is logged yet. Raises OSError."""
        self.edition = secrets.token_hex(4)
        self.last_step = -1
        self._digests, self._unsaved = {}, []
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_lines(self._path, json.dumps({"edition": self.edition}) + "\n")

    def known(self, step: int, part: Part) -> int | None:
        """Return the digest of a part of a step (numbers, evaluation or samples) if it was logged, else None."""
        return self._digests.get((step, part))

    def add(self, step: int, part: Part, digest: int) -> None:
        """Record that a part of a step was logged. `save` writes the record to disk."""
        self._digests[step, part] = digest
        self.last_step = max(self.last_step, step)
        self._unsaved.append(json.dumps({"step": step, "part": part, "digest": digest}) + "\n")

    def save(self) -> None:
        """Write the parts added since the last call to disk. Raises OSError."""
        if self._unsaved:
            append_lines(self._path, "".join(self._unsaved))
            self._unsaved = []


def digest(numbers: Mapping[str, Any]) -> int:
    """Return a digest of a step's numbers, by which a step that was trained again is recognised."""
    return zlib.crc32(json.dumps(numbers, sort_keys=True).encode())


READ_BYTES = 1 << 20
"""Approximate number of bytes to read from a file at once."""


class FollowedFile:
    """Reads the lines of a growing file. Starts from the beginning if the file was replaced or truncated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._end = 0
        """Offset in the file of the end of the last line that was read, in bytes."""
        self._last = b""
        """The last line that was read, in bytes, with its newline."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return True if reading began at the file's beginning, and the next lines; none at the end of the file.

        Lines that are no JSON objects are skipped: their writer died. Raises OSError.
        """
        again = self._reopen_if_changed()
        if self._file is None:
            return False, []
        self._file.seek(self._end)
        lines = [line for line in self._file.readlines(READ_BYTES) if line.endswith(b"\n")]
        if lines:
            self._end += sum(map(len, lines))
            self._last = lines[-1]
        return again, [value for line in lines if (value := parse_line(line)) is not None]

    def close(self) -> None:
        """Close the file. The next `read` starts at the file's beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen_if_changed(self) -> bool:
        """Open the file at its beginning, unless it is already open and has only grown.

        Return True if it was opened.
        """
        try:
            number = os.stat(self._path).st_ino
        except FileNotFoundError:
            return False
        if self._file is not None and os.fstat(self._file.fileno()).st_ino == number and self._has_last_line():
            return False
        self.close()
        self._file = self._path.open("rb")
        self._end, self._last = 0, b""
        return True

    def _has_last_line(self) -> bool:
        """Return True if the last line that was read is still at the same offset."""
        assert self._file is not None
        self._file.seek(self._end - len(self._last))
        return self._file.read(len(self._last)) == self._last
