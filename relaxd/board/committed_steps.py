"""The committed steps of a run: the newest ones from the board, trimmed ones from ledger.jsonl."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from relaxd.board import LedgerEntry, LedgerTrimmed
from relaxd.run_folder import LEDGER

ReadLedger = Callable[[int, int], list[LedgerEntry]]
"""Type of functions (after_step, limit) that return at most `limit` committed steps after a step."""
PAGE = 16
"""Number of committed steps to read at once: the plan of a step may have hundreds of kilobytes."""
STEP = re.compile(rb'\{"step": (\d+),')
"""Matches the beginning of a line of ledger.jsonl, which shows the step without parsing the plan."""


class CommittedSteps:
    """Reads committed steps in order: from the board, or from ledger.jsonl those that the board no longer has.

    The coordinator trims steps from the board only after it wrote them to the run's folder.
    """

    def __init__(self, read: ReadLedger, folder: Path) -> None:
        """`read`: reads the board's ledger. `folder`: the run's folder."""
        self._read = read
        self._path = folder / LEDGER
        self._position = (0, 0)
        """A step, and the byte offset in ledger.jsonl of the next step's line, where reads of later steps start."""

    def __call__(self, after_step: int, limit: int) -> list[LedgerEntry]:
        """Return at most `limit` steps after `after_step`.

        Raises LedgerTrimmed if the board has trimmed them and the file lacks them, and BoardUnavailable.
        """
        try:
            return self._read(after_step, limit)
        except LedgerTrimmed as trimmed:
            entries = self._from_file(after_step, min(limit, trimmed.first - 1 - after_step))
            if not entries:
                raise LedgerTrimmed(trimmed.first, f"{trimmed}; {self._path} lacks step {after_step + 1}") from None
            return entries

    def pages(self, after_step: int) -> Iterator[list[LedgerEntry]]:
        """Yield all committed steps after `after_step`, in lists of at most PAGE. Raises the board's errors."""
        while page := self(after_step, PAGE):
            yield page
            after_step = page[-1].step

    def _from_file(self, after_step: int, limit: int) -> list[LedgerEntry]:
        """Return at most `limit` of the steps after `after_step` in ledger.jsonl."""
        entries: list[LedgerEntry] = []
        if not self._path.is_file():
            return entries
        step, start = self._position
        with self._path.open("rb") as file:
            file.seek(start if step <= after_step else 0)
            while len(entries) < limit and (line := file.readline()).endswith(b"\n"):
                found = STEP.match(line)
                if found and int(found[1]) == after_step + len(entries) + 1:
                    entries.append(LedgerEntry(**json.loads(line)))
                    self._position = (entries[-1].step - 1, file.tell() - len(line))
        return entries
