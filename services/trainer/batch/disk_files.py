"""Files on disk: durable writes, and work on several files at the same time."""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from safetensors import SafetensorError

SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
"""Matches the operating system's error number in an error message of safetensors."""


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def errors_of_the_system(path: Path) -> Iterator[None]:
    """Context for writing a file with safetensors: give it usual permissions, and raise OSError for system errors.

    safetensors itself lets only the owner read its files, and raises SafetensorError.
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


Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Type of callbacks that get the number of bytes processed since the last call."""

THREADS = 8
"""Maximum number of files processed at the same time."""
REPORT_SECONDS = 0.2
"""Interval between calls of the progress callback, in seconds."""


def in_parallel(
    work: Mapping[str, Callable[[Progress], Result]],
    progress: Progress = lambda count: None,
    begin: Callable[[], Any] = lambda: None,
) -> dict[str, Result]:
    """Run functions in several threads, and wait for all of them.

    Args:
        work: functions by name. Each gets a callback for the number of bytes that it has processed.
        progress: called in the calling thread with the numbers of bytes that the functions report.
        begin: called once in each thread, before any function.

    Returns:
        The functions' results, by name.

    Raises:
        Exception: the error of the first function in `work` that failed, after all have ended.
    """
    done: SimpleQueue[int] = SimpleQueue()
    with ThreadPoolExecutor(THREADS, "files", initializer=begin) as pool:
        found = {name: pool.submit(piece, done.put) for name, piece in work.items()}
        pending = set(found.values())
        while pending:
            _, pending = wait(pending, REPORT_SECONDS)  # named: the caller's work, with what `progress` counts
            while not done.empty():
                progress(done.get_nowait())
    return {name: future.result() for name, future in found.items()}
