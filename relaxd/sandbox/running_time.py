"""Measures this process's running time, without times in which it was stopped or its machine was suspended."""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
"""Maximum seconds that a wait lasts before the clock is read again."""
LATE_SECONDS = 1.0
"""If the clock is read later than planned by more than this number of seconds, the process counts as having been
stopped in between."""


def ran(planned: float, passed: float) -> float:
    """Estimate the part of the last `passed` seconds in which this process ran, not stopped or suspended.

    The process planned to read the clock after `planned` seconds. If it read it much later, it was stopped some
    time before, and half of `planned` counts: results can still be read, and deadlines still end.
    """
    return passed if passed <= planned + LATE_SECONDS else planned / 2


class RunningClock:
    """A clock that doesn't count time in which this process was stopped. It infers such times from waits that took much
    longer than planned."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stood = 0.0
        """Total seconds for which this process was stopped, as estimated so far."""
        self._wait: tuple[float, float] | None = None
        """(start time, planned seconds) of the wait in progress; None outside of waits."""

    def now(self) -> float:
        """Return the clock's time, in seconds; if `plan` announced a wait, it ends here."""
        now = self._clock()
        if self._wait is not None:
            begin, planned = self._wait
            self._stood += now - begin - ran(planned, now - begin)
            self._wait = None
        return now - self._stood

    def plan(self, seconds: float) -> float:
        """Announce that the caller is about to wait. Returns the time to wait before the next call of `now`: at most
        `seconds` and LOOK_SECONDS."""
        self.now()
        planned = min(seconds, LOOK_SECONDS)
        self._wait = (self._clock(), planned)
        return planned
