"""Waits: what this process waits for, on whom and since when, the back-off between attempts, and a clock that never
goes back while the process lives.

Code that may wait long does so inside `waiting`. `waits` lists the current waits of a process: replicas report the
longest wait in their status, and the coordinator builds `Run.waiting_for` from its own. Long waits are logged
automatically. tests/unit/source_code/test_waits_are_named.py says which waits must be named.
"""

import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

TICK_SECONDS = 1.0
FIRST_NOTICE_SECONDS = 30.0
"""Length at which a wait is first logged, in seconds. It is logged again each time its length has doubled."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Wait:
    """A wait in progress. The waiting code may update `reason` and `on`."""

    reason: str
    """The awaited thing, such as "the last groups of step 12"."""
    on: str = ""
    """The party whose action ends the wait, such as a replica's id; empty if there is no particular one."""
    since: float = field(default_factory=time.monotonic)
    """Start of the wait, in seconds of the monotonic clock."""
    disk: bool = False
    """True if the wait ends once the run's folder is writable, for instance when its disk has room again."""
    next_notice: float = FIRST_NOTICE_SECONDS
    """Length of the wait, in seconds, at which it is logged next."""

    @property
    def seconds(self) -> float:
        """Length of the wait so far, in seconds."""
        return time.monotonic() - self.since

    @contextmanager
    def named(self) -> Iterator[None]:
        """List this wait among the process's current waits inside the block."""
        _OF_THIS_PROCESS.begin(self)
        try:
            yield
        finally:
            _OF_THIS_PROCESS.end(self)

    def __str__(self) -> str:
        return self.reason + (f" ({self.on})" if self.on and self.on not in self.reason else "")


class Waits:
    """The current waits of one process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waits: set[Wait] = set()
        self._thread: threading.Thread | None = None

    def begin(self, wait: Wait) -> None:
        """Add a wait to the current waits."""
        with self._changed:
            self._waits.add(wait)
            if self._thread is None:
                self._thread = threading.Thread(target=self._log_forever, name="waits", daemon=True)
                self._thread.start()
            self._changed.notify()

    def end(self, wait: Wait) -> None:
        """Remove a wait that has ended from the current waits."""
        with self._changed:
            self._waits.discard(wait)

    def all(self) -> list[Wait]:
        """Return the waits in progress, the longest first."""
        with self._changed:
            return sorted(self._waits, key=lambda wait: wait.since)

    def _log_forever(self) -> None:
        while True:
            with self._changed:
                if not self._waits:
                    self._changed.wait()  # idle: nothing waits
            for notice in due_notices(self.all()):
                logger.warning("%s", notice)
            time.sleep(TICK_SECONDS)  # idle: looks again


def due_notices(waits: list[Wait]) -> list[str]:
    """Return a log line for each wait that is due to be logged, and double the length at which it is logged next."""
    lines = []
    for wait in waits:
        if wait.seconds >= wait.next_notice:
            lines.append(f"waiting for {wait}, for {duration(wait.seconds)} now")
            wait.next_notice *= 2
    return lines


_OF_THIS_PROCESS = Waits()


@contextmanager
def waiting(reason: str, *, on: str = "", disk: bool = False) -> Iterator[Wait]:
    """List a wait inside the block: `reason` says what for, `on` for whom. `disk` is explained at `Wait.disk`."""
    wait = Wait(reason, on, disk=disk)
    with wait.named():
        yield wait


def waits(min_seconds: float = 0.0) -> list[Wait]:
    """Return this process's waits of at least `min_seconds`, the longest first."""
    return [wait for wait in _OF_THIS_PROCESS.all() if wait.seconds >= min_seconds]


def duration(seconds: float) -> str:
    """Format a duration for people: "34 s", "12 min", "3.5 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Backoff:
    """Pauses between attempts, which start at `first_seconds` and double up to `max_seconds`."""

    first_seconds: float
    max_seconds: float = float("inf")

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after this many consecutive failures, counted from 1."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 64), self.max_seconds)

    def spread_pause(self, failures: int) -> float:
        """Return `pause` plus a random extra of up to half of it, so that many callers don't retry at the same time."""
        return self.pause(failures) * (1 + random.random() / 2)


_START = time.time() - time.monotonic()


def steady_time() -> float:
    """Return Unix time in seconds. Changes of the system's clock since this process began are ignored."""
    return _START + time.monotonic()
