"""A file that one coordinator at a time appends to."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

Check = Callable[[], None]
"""Raises Superseded if this coordinator was replaced."""


class AppendedFile:
    """Appends to a file that stays open.

    Whoever takes the file over puts a copy in its place. A coordinator that was replaced, but doesn't know it yet, goes
    on to append to the file that it has open, which nobody reads any more: no lock is needed, and one that is stopped
    holds nobody up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def replace(self, parts: Iterable[bytes], check: Check) -> None:
        """Replace the file by one with this content, and append to that one from now on. Raises what `check` raises.

        After an error the old file is still there and still appended to, so that this can be repeated or left.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        file = temporary.open("wb")
        try:
            file.writelines(parts)
            file.flush()
            check()
            os.replace(temporary, self._path)
        except BaseException:
            file.close()
            temporary.unlink(missing_ok=True)
            raise
        self.close()
        self._file = file

    def append(self, parts: Iterable[bytes]) -> None:
        """Append to the file."""
        assert self._file is not None, "replace comes first"
        self._file.writelines(parts)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
