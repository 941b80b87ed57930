"""A file that one coordinator at a time appends to."""

import contextlib
import io
import os
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from relaxd.run_folder import append_whole

LEFTOVER_SECONDS = 3600.0
"""Time without a write after which a temporary file is that of a coordinator that died."""

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
        self._file: io.FileIO | None = None

    def replace(self, parts: Iterable[bytes], check: Check) -> None:
        """Replace the file by one with this content, and append to that one from now on. Raises what `check` raises.

        After an error the old file is still there and still appended to, so that this can be repeated or left.
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
        """Remove the temporary files of coordinators that died while they wrote them."""
        for path in self._path.parent.glob(f"{self._path.name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # another coordinator has removed it
                if time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
                    path.unlink()

    def append(self, parts: Iterable[bytes]) -> None:
        """Append to the file, all parts or none. Raises OSError."""
        assert self._file is not None, "replace comes first"
        append_whole(self._file, b"".join(parts))

    def sync(self) -> None:
        """Wait until the disk has the file. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
