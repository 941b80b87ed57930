"""Full disks for processes, without one: a limit on how far a file may grow, beyond which a write fails."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_disk(most: int = 0, pid: int = 0) -> Iterator[None]:
    """Let no file of a process, by default this one, grow beyond `most` bytes: a write then fails in the middle."""
    pid = pid or os.getpid()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
