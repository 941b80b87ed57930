"""ledger.jsonl: the steps of the board's ledger, in order, so that the run survives the loss of all Redis data."""

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from relaxd.board import LedgerEntry, LedgerTrimmed
from relaxd.board.committed_steps import ReadLedger
from relaxd.run_folder import newest_lines_with_ends
from services.coordinator.runs.lines.appended_file import AppendedFile, Check

PAGE = 256
"""Steps that are read at once."""
COPIED_BYTES = 1 << 20
Identity = tuple[int, int, float]
"""`LedgerEntry.identity`. Trainer terms begin at 1; 0: which commit it is isn't known."""

logger = logging.getLogger(__name__)


class LedgerFile:
    """Keeps ledger.jsonl as the board's ledger is.

    Redis may lose its newest writes, and a step be committed again with other groups. So each look at the ledger begins
    with the last step that the file has, and lines that the ledger doesn't have are replaced.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = AppendedFile(path)
        self._check: Check = lambda: None
        self._last: Identity = (0, 0, 0.0)
        self.rewound_to: int | None = None
        """The step after which lines were replaced, until somebody who has seen it sets None."""

    @property
    def last_step(self) -> int:
        """The last step in the file."""
        return self._last[0]

    def take_over(self, read: ReadLedger, check: Check) -> int:
        """Take the file over, and bring it up to date. `check` is asked before the file is replaced, now and later.

        Returns the last of the steps that were in it and are in the ledger, too.
        """
        self._check = check
        self._file.remove_leftovers()
        self._rewind(read)
        self.rewound_to = None
        kept = self.last_step
        while self.follow(read):
            pass
        return kept

    def follow(self, read: ReadLedger) -> list[LedgerEntry]:
        """Append the next steps, at most PAGE, after replacing lines that the ledger doesn't have. Returns the steps.

        If `read` raises, it can be repeated.
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
            self._file.append([json.dumps(asdict(entry)).encode() + b"\n" for entry in entries])
            self._last = entries[-1].identity
        return entries

    def sync(self) -> None:
        """Wait until the disk has the file. Raises OSError."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewind(self, read: ReadLedger) -> None:
        """Replace the file by its lines up to the last one that the ledger has, too."""
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
            self._file.replace((), self._check)
        else:
            with self._path.open("rb") as file:
                self._file.replace(_lines_until(file, end), self._check)
        self._last = last


def _lines_until(file: BinaryIO, end: int) -> Iterator[bytes]:
    """Yield the bytes before `end`, and the line feed that the last line may lack."""
    last = b""
    while end > 0 and (part := file.read(min(COPIED_BYTES, end))):
        yield part
        last, end = part, end - len(part)
    if not last.endswith(b"\n"):
        yield b"\n"
