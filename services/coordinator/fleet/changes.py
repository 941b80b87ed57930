"""Notification of changes."""

import asyncio
import contextlib


class Signal:
    """A broadcast without content: wakes all waiters, which then check their own condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake all current waiters."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for the next `fire` or the timeout."""
        # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._event.wait()
