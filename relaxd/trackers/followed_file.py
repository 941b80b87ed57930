"""A JSONL file that is read while another process appends to it, truncates it or replaces it."""

import io
import os
from pathlib import Path
from typing import Any

from relaxd.run_folder import parse_line

READ_BYTES = 1 << 20
"""Approximate number of bytes to read at once."""


class FollowedFile:
    """Reads the lines of a growing file, and starts again if it was replaced or truncated."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: io.BufferedReader | None = None
        self._end = 0
        """Offset of the end of the last line that was read."""
        self._last = b""
        """The last line that was read."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file is read from its beginning, and lines; none when all have been read.

        Skips lines that are no JSON objects: their writer died. Raises OSError.
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
        """Close the file. The next `read` starts at its beginning."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _reopen_if_changed(self) -> bool:
        """Open the file at its beginning, unless it is open and has only grown. Returns whether it was opened."""
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
        """Return whether the last line that was read is still in its place."""
        assert self._file is not None
        self._file.seek(self._end - len(self._last))
        return self._file.read(len(self._last)) == self._last
