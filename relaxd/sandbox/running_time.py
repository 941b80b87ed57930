"""Measures this process's running time, without times in which it was stopped or its machine was suspended."""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
"""Maximum seconds between two checks of the clock during a wait."""
LATE_SECONDS = 1.0
"""Delay of a check, in seconds, above which the process counts as having been stopped."""


def ran(planned: float, passed: float) -> float:
    """Estimate for how many of `passed` seconds this process ran, when it planned to check the clock after `planned`.

    A check that is far too late means that the process was stopped at some time before the planned check, so half of
    `planned` counts: results can still be read, and deadlines still end.
    """
    return passed if passed <= planned + LATE_SECONDS else planned / 2


class RunningClock:
    """A clock that stops while this process is stopped, as far as late checks of its planned waits show."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stood = 0.0
        """Seconds for which the process was stopped."""
        self._wait: tuple[float, float] | None = None
        """Start time and planned seconds of the current wait."""

    def now(self) -> float:
        """Return the time, in seconds, and end the wait in progress."""
        now = self._clock()
        if self._wait is not None:
            begin, planned = self._wait
            self._stood += now - begin - ran(planned, now - begin)
            self._wait = None
        return now - self._stood

    def plan(self, seconds: float) -> float:
        """Begin a wait of at most `seconds`. Returns the seconds after which to call `now`."""
        self.now()
        planned = min(seconds, LOOK_SECONDS)
        self._wait = (self._clock(), planned)
        return planned
