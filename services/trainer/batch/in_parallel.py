"""Work on several files at the same time."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")
Progress = Callable[[int], None]
"""Callback with the bytes processed since the last call."""

THREADS = 8
"""Files at the same time."""
REPORT_SECONDS = 0.2
"""Interval at which progress is reported."""


def in_parallel(
    work: Mapping[str, Callable[[Progress], Result]],
    progress: Progress = lambda count: None,
    begin: Callable[[], Any] = lambda: None,
) -> dict[str, Result]:
    """Do pieces of work in threads.

    Args:
        work: the pieces by name. Each is called with a callback for the bytes that it has processed.
        progress: called with these bytes, in this thread.
        begin: called first in each thread.

    Returns:
        The results by name.

    Raises:
        Exception: what the first piece that failed has raised, once all have ended.
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
