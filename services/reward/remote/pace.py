"""When the next call of a service may begin."""

import time
from collections.abc import Callable


class Pace:
    """Calls begin at even intervals, and none while the service wants to be left alone."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`per_second` is the most calls that begin in a second; 0: any number. `clock` returns seconds."""
        self._interval = 1 / per_second if per_second else 0.0
        self._clock = clock
        self._next = self._held_until = clock()

    @property
    def held(self) -> bool:
        """True if the service wants to be left alone."""
        return self._clock() < self._held_until

    def pause(self) -> float:
        """Return the seconds until a call may begin; 0: now."""
        return max(0.0, self._next - self._clock(), self._held_until - self._clock())

    def begin(self) -> None:
        """Report that a call begins."""
        self._next = self._clock() + self._interval

    def hold(self, seconds: float) -> None:
        """Let no call begin for this long, or for longer if that was said before."""
        self._held_until = max(self._held_until, self._clock() + seconds)
