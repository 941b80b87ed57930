"""The deadline of a reward's call. Its clock stops during questions to the judge and while this process is stopped."""

import asyncio
from types import TracebackType

from relaxd.sandbox.running_time import LOOK_SECONDS, ran

END_SECONDS = 0.001
"""Remaining seconds below which a deadline counts as passed."""


class Deadline:
    """Async context manager that cancels its block after `seconds` and raises TimeoutError. Time in pauses doesn't
    count.

    Use it in one event loop.
    """

    def __init__(self, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = asyncio.timeout(None)
        self._seconds = seconds
        self._left = seconds
        self._planned = 0.0
        """Planned seconds from the last check of the deadline to the next."""
        self._since = self._loop.time()
        """Event loop time of the last check of the deadline."""
        self._timer: asyncio.TimerHandle | None = None
        self._pauses = 0
        self._over = False

    @property
    def seconds(self) -> float:
        """Seconds that have passed since the block began, without pauses."""
        running = 0.0 if self._pauses else ran(self._planned, self._loop.time() - self._since)
        return self._seconds - self._left + running

    def pause(self) -> None:
        """Stop the deadline's clock. Pauses nest: each needs its own `resume`."""
        self._pauses += 1
        if self._pauses == 1:
            self._count()

    def resume(self) -> None:
        """End a pause; the deadline's clock runs again once all pauses have ended."""
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
        """Schedule the next check of the deadline; if the deadline has passed, end the block."""
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
        """Subtract the time since the last check from the remaining time, and cancel the scheduled check."""
        if self._timer is not None:
            self._timer.cancel()
        now = self._loop.time()
        self._left -= ran(self._planned, now - self._since)
        self._since = now


SLOW_SECONDS = 5.0
"""Seconds after which a running sample is reported as slow, or half the sample's deadline if that is shorter."""


def slow_after(deadline_seconds: float) -> float:
    """Return the seconds after which a sample with the given deadline counts as slow."""
    return max(0.01, min(SLOW_SECONDS, deadline_seconds / 2))
