"""Waiting until something is on the disk."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
