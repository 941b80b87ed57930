"""Signals that wake waiting tasks after a change."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from weakref import WeakSet

GAP_SECONDS = 0.02
"""Minimum seconds between two wake-ups of waiters; signals in between share the next wake-up."""


class Signal:
    """A broadcast without content: it wakes all waiters, which then check their conditions. Lives in the event loop."""

    def __init__(self, gap: Callable[[], float] = lambda: GAP_SECONDS) -> None:
        """`gap` returns the minimum seconds between two wake-ups; values below GAP_SECONDS count as GAP_SECONDS."""
        self._gap = gap
        self._event = asyncio.Event()
        self._followers: WeakSet[SignalFollower] = WeakSet()
        self._woken_at = float("-inf")
        self._due: asyncio.TimerHandle | None = None

    def fire(self) -> None:
        """Wake all waiters, at once or when the gap since the last wake-up is over."""
        if self._due is not None:
            return
        pause = self._woken_at + max(GAP_SECONDS, self._gap()) - time.monotonic()
        if pause <= 0:
            self._wake()
        else:
            self._due = asyncio.get_running_loop().call_later(pause, self._wake)

    def _wake(self) -> None:
        self._due, self._woken_at = None, time.monotonic()
        for follower in self._followers:
            follower.wake()
        event, self._event = self._event, asyncio.Event()
        event.set()

    def follow(self) -> "SignalFollower":
        """Return a follower, which is woken before the waiters while a reference to it exists."""
        follower = SignalFollower()
        self._followers.add(follower)
        return follower

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for the next `fire` or the timeout."""
        await _wait(self._event, timeout_seconds)


class SignalFollower:
    """Waits for a debounced signal or an immediate wake-up. Also notices signals between two waits."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake the follower at once."""
        self._event.set()

    async def wait(self, timeout_seconds: float) -> None:
        """Wait for a signal since the last wait, or for the timeout."""
        await _wait(self._event, timeout_seconds)
        self._event.clear()


async def _wait(event: asyncio.Event, timeout_seconds: float) -> None:
    # Not asyncio.wait_for: before Python 3.12 it loses a cancellation that arrives together with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_seconds):
            await event.wait()
