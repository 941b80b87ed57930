"""The deadline of a reward's call. Its clock stops during questions to the judge and while this process is stopped."""

import asyncio
from types import TracebackType

from relaxd.sandbox.running_time import LOOK_SECONDS, ran

END_SECONDS = 0.001
"""Remaining seconds below which a deadline has passed."""


class Deadline:
    """Async context manager: cancels its block after `seconds` and raises TimeoutError. Pauses don't count.

    Use it in one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._seconds = seconds
        self._left = seconds
        self._planned = 0.0
        """Planned seconds from the last check to the next one."""
        self._since = self._loop.time()
        """Time of the last check."""
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._over = False

    @property
    def seconds(self) -> float:
        """Seconds that have passed, without pauses."""
        running = 0.0 if self._pauses else ran(self._planned, self._loop.time() - self._since)
        return self._seconds - self._left + running

    def pause(self) -> None:
        """Stop the clock. Pauses nest: each needs its `resume`."""
        self._pauses += 1
        if self._pauses == 1:
            self._count()

    def resume(self) -> None:
        """End a pause."""
        self._pauses -= 1
        if not self._pauses:
            self._go_on()

    async def __aenter__(self) -> "Deadline":
        await self._timeout.__aenter__()
        self._go_on()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def _go_on(self) -> None:
        """Plan the next check, or end the block."""
        if self._over or self._timeout.expired():
            return
        self._since = self._loop.time()
        if self._left < END_SECONDS:
            self._timeout.reschedule(self._since)
            return
        self._planned = min(self._left, LOOK_SECONDS)
        self._timer = self._loop.call_later(self._planned, self._look)

    def _look(self) -> None:
        self._count()
        self._go_on()

    def _count(self) -> None:
        """Count the time since the last check, and cancel the next one."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        self._left -= ran(self._planned, now - self._since)
        self._since = now


SLOW_SECONDS = 5.0
"""Seconds after which a running sample is reported as slow; half the deadline, if that is shorter."""


def slow_after(deadline_seconds: float) -> float:
    """Return the seconds after which a sample with this deadline is slow."""
    return max(0.01, min(SLOW_SECONDS, deadline_seconds / 2))
