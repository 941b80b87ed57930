"""metrics.jsonl: the metrics of each step, with those of its evaluation."""

import json
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relaxd.board import LedgerTrimmed
from relaxd.board.committed_steps import ReadLedger
from relaxd.run_folder import read_lines
from services.coordinator.runs.lines.appended_file import AppendedFile, Check
from services.coordinator.runs.lines.ledger_file import PAGE
from services.coordinator.state.records import Evaluation

Steps = Iterable[tuple[int, Mapping[str, Any]]]
"""(step, its line), in order."""


class MetricsFile:
    """A line per step, and one for an evaluation of step 0.

    What the coordinator itself measures is only in this file, so lines that are there are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendedFile(path)
        self._check: Check = lambda: None
        self._evaluations: dict[int, dict[str, float]] = {}
        self._writing = threading.Lock()  # an evaluation may end beside training
        self.last_step = 0
        """The last step in the file."""

    def take_over(
        self, read: ReadLedger, check: Check, kept: int, last_step: int, evaluations: Iterable[Evaluation]
    ) -> None:
        """Take the file over with its lines up to the step `kept`; the ledger gives those that it lacks.

        `check` is asked before the file is replaced, now and later.
        """
        self._check = check
        self._file.remove_leftovers()
        self._evaluations = {evaluation.step: evaluation.metrics for evaluation in evaluations}
        self._rewrite(read, kept, last_step)

    def rewind(self, last_step: int) -> None:
        """Remove the lines after a step: it was committed again, or was lost with Redis's newest writes."""
        if last_step < self.last_step:
            self._rewrite(lambda after, limit: [], last_step, last_step)

    def append(self, steps: Steps) -> None:
        """Append steps, all or none. Raises OSError; then it can be repeated."""
        with self._writing:
            steps = list(steps)
            self._file.append(self._line(step, metrics) for step, metrics in steps)
            self.last_step = max((step for step, _ in steps), default=self.last_step)

    def add(self, evaluation: Evaluation) -> None:
        """Add an evaluation to its step's line, or to the line that the step is going to have."""
        self._evaluations[evaluation.step] = evaluation.metrics
        if evaluation.step <= self.last_step:
            with self._writing:
                self._file.replace(self._lines_with(evaluation.step), self._check)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, read: ReadLedger, kept: int, last_step: int) -> None:
        with self._writing:
            self._file.replace(self._lines(read, kept, last_step), self._check)
            self.last_step = last_step

    def _lines_with(self, step: int) -> Iterator[bytes]:
        """Yield all lines as they are but that of a step, which gets its evaluation: encoding all takes seconds."""
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
        """Yield the line of every step up to the last one, in order: the file's up to `kept`, and the ledger's."""
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
        """Yield lines with what the ledger has on these steps."""
        while after < until:
            try:
                entries = read(after, min(PAGE, until - after))
            except LedgerTrimmed as trimmed:  # nobody has the steps between: ledger.jsonl, too, goes on without them
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
    """Return whether a line is that of a step, given how it begins: that of step 12 isn't that of step 1."""
    return line.startswith(beginning) and line[len(beginning) :][:1] in (b",", b"}")


def json_line(values: Mapping[str, Any]) -> bytes:
    """Return a line of JSON, which has null for NaN and infinity."""
    return json.dumps(finite(values)).encode() + b"\n"


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON lacks, by null."""
    return {name: _finite(value) for name, value in values.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return finite(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
