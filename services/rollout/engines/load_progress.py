"""Progress of loading a model, observed from outside the loading process."""

from contextlib import suppress

import psutil


def loaded_mebibytes(parent: psutil.Process) -> int:
    """Return a number, in MiB, that changes as long as a descendant of `parent` loads anything: bytes read plus memory.

    Memory counts because read calls don't show files that are mapped.
    """
    total = 0
    for process in parent.children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_info().rss
            total += process.io_counters().read_chars if psutil.LINUX else 0
    return total >> 20
