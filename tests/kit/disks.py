"""Full disks for processes, without one, and a lack of descriptors: limits of a process that fail its system calls."""

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def full_disk(most: int = 0, pid: int = 0) -> Iterator[None]:
    """Let no file of a process, by default this one, grow beyond `most` bytes: a write then fails in the middle."""
    with _limited(resource.RLIMIT_FSIZE, most, pid or os.getpid()):
        yield


@contextmanager
def no_descriptors(pid: int) -> Iterator[None]:
    """Let a process open no further file, socket or pipe; those that it has stay open."""
    free = next(number for number in itertools.count() if not os.path.lexists(f"/proc/{pid}/fd/{number}"))
    with _limited(resource.RLIMIT_NOFILE, free, pid):
        yield


@contextmanager
def _limited(kind: int, most: int, pid: int) -> Iterator[None]:
    soft, hard = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (most, hard))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it has ended
            resource.prlimit(pid, kind, (soft, hard))
