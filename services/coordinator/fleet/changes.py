"""Notification of changes."""

import asyncio
import contextlib
import time
from collections.abc import Callable

GAP_SECONDS = 0.02
"""Changes within this time after a wake-up wake their waiters together, unless the gap is set to be longer."""


class Signal:
    """A broadcast without content: wakes all waiters, which then check their own condition. Lives in the event loop."""

    def __init__(self, gap: Callable[[], float] = lambda: GAP_SECONDS) -> None:
        """`gap` returns the seconds between two wake-ups, which are at least GAP_SECONDS."""
        self._gap = gap
        self._event = asyncio.Event()
        self._woken_at = float("-inf")
        self._due: asyncio.TimerHandle | None = None

    def fire(self) -> None:
        """Wake all waiters: at once, or a gap after the last time."""
        if self._due is not None:
            return
        pause = self._woken_at + max(GAP_SECONDS, self._gap()) - time.monotonic()
        if pause <= 0:
            self._wake()
        else:
            self._due = asyncio.get_running_loop().call_later(pause, self._wake)

    def _wake(self) -> None:
        self._due, self._woken_at = None, time.monotonic()
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for the next `fire` or the timeout."""
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
