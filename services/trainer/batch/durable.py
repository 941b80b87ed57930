"""Durable writes."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""The system's error number in an error of safetensors."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def errors_of_the_system(path: Path) -> Iterator[None]:
    """Write a file with safetensors in the block, with the permissions and errors that other files have.

    safetensors lets only the owner read its files, and raises errors of its own.
    """
    path.touch()
    permissions = path.stat().st_mode
    try:
        yield
        path.chmod(permissions)
    except SafetensorError as error:
        refused = SYSTEM_ERROR.search(str(error))
        if refused is None:
            raise
        number = int(refused[1])
        raise OSError(number, os.strerror(number), str(path)) from error
