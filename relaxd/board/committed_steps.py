"""The committed steps of a run: the newest ones from the board, trimmed ones from ledger.jsonl."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from relaxd.board import LedgerEntry, LedgerTrimmed
from relaxd.run_folder import LEDGER

ReadLedger = Callable[[int, int], list[LedgerEntry]]
"""Function of a step and a maximum number that returns the committed steps after that step, such as `Board.ledger`."""
PAGE = 16
"""Number of steps to read at once: a plan may have hundreds of kilobytes."""
STEP = re.compile(rb'\{"step": (\d+),')
"""Beginning of a ledger line, which shows its step without parsing the plan."""


class CommittedSteps:
    """Reads committed steps in order. The coordinator trims the board only after it wrote them to the folder."""

    def __init__(self, read: ReadLedger, folder: Path) -> None:
        """`read` reads the board's ledger; `folder` is the run's."""
        self._read = read
        self._path = folder / LEDGER
        self._position = (0, 0)
        """A step, and the byte offset of the next step's line, where reads of later steps start."""

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
        """Yield all steps after `after_step`, page by page. Raises the errors of the board's calls."""
        while page := self(after_step, PAGE):
            yield page
            after_step = page[-1].step

    def _from_file(self, after_step: int, limit: int) -> list[LedgerEntry]:
        """Return the steps after `after_step` that the file has, at most `limit`."""
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
