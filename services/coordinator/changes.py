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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_seconds)
