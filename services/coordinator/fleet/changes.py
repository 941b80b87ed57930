"""Waking whoever waits for a change."""

import asyncio
import contextlib


class Signal:
    """Something happened: every waiter wakes up, and looks for itself."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for the next `fire`, or until the time is over."""
        # Not asyncio.wait_for: before Python 3.12 it forgets a cancellation that comes together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
