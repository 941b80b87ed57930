"""Time that an engine was busy, paused or idle, counted where requests pass."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GAUGES = ("engine_busy_seconds", "engine_paused_seconds", "engine_state")


class Occupancy:
    """Counts the seconds busy and paused since the process started. Lives in one event loop.

    An engine is busy while it has at least one request and is not paused, and idle for the rest of the time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = 0
        self._paused_until: float | None = None
        self._busy = self._paused = 0.0
        self._since = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Count a request as running inside the block."""
        self._count()
        self._requests += 1
        try:
            yield
        finally:
            self._count()
            self._requests -= 1

    def pause(self, lease_seconds: float) -> None:
        """Start a pause, which ends with `resume` or after `lease_seconds`."""
        self._count()
        self._paused_until = self._clock() + lease_seconds

    def resume(self) -> None:
        """End the pause, if any."""
        self._count()
        self._paused_until = None

    @property
    def is_paused(self) -> bool:
        """True if there is a pause, whose lease hasn't ended."""
        self._count()
        return self._paused_until is not None

    def gauges(self) -> dict[str, float]:
        """Return engine_busy_seconds and engine_paused_seconds so far, and engine_state: 0 idle, 1 busy, 2 paused."""
        state = 2.0 if self.is_paused else 1.0 if self._requests else 0.0
        return dict(zip(GAUGES, (self._busy, self._paused, state), strict=True))

    def _count(self) -> None:
        """Add the time since the last change."""
        now = self._clock()
        if self._paused_until is not None:
            end = min(now, self._paused_until)
            self._paused += max(0.0, end - self._since)
            self._since = max(self._since, end)
            if now >= self._paused_until:
                self._paused_until = None
        if self._requests and self._paused_until is None:
            self._busy += now - self._since
        self._since = now
