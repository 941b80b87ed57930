"""How far the loading of a model is, seen from outside the process that loads it."""

from contextlib import suppress

import psutil


def loaded_mebibytes(parent: psutil.Process) -> int:
    """MiB that a process's descendants have read and hold in memory: moves for as long as they load anything.

    Both are counted because a file that is mapped into memory is not read by calls.
    """
    total = 0
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_info().rss
            total += process.io_counters().read_chars if psutil.LINUX else 0
    return total >> 20
