"""Running time of this process, without the time in which it was stopped or its machine was suspended."""

import time
from collections.abc import Callable

LOOK_SECONDS = 0.5
"""Maximum seconds between two checks of the clock during a wait."""
LATE_SECONDS = 1.0
"""Delay of a check, in seconds, above which the process must have stood still."""


def ran(planned: float, passed: float) -> float:
    """Estimate how long this process ran in `passed` seconds, after which it looked instead of after `planned`.

    A process that stood still looks late. It stopped somewhere in the planned time, so half of that counts: what was
    computed meanwhile can still be read, and a deadline ends all the same.
    """
    return passed if passed <= planned + LATE_SECONDS else planned / 2


class RunningClock:
    """A clock that stands still while this process does, as far as the waits planned with it can show."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stood = 0.0
        """Seconds in which the process stood still."""
        self._wait: tuple[float, float] | None = None
        """Beginning and planned length of the current wait."""

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
