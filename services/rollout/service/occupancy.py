"""How much of its time an engine worked, was paused for weights, or had nothing to do: counted where requests pass."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GAUGES = ("engine_busy_seconds", "engine_paused_seconds", "engine_state")


class Occupancy:
    """A clock for each of busy and paused, both cumulative over the life of this process. Lives in one event loop.

    An engine is busy while it has at least one request and is not paused. What is left of the time, it was idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = 0
        self._paused_until: float | None = None
        self._busy = self._paused = 0.0
        self._since = clock()

    @contextmanager
    def working(self) -> Iterator[None]:
        """A request is with the engine inside the block."""
        self._count()
        self._requests += 1
        try:
            yield
        finally:
            self._count()
            self._requests -= 1

    def pause(self, lease_seconds: float) -> None:
        """The engine is paused from now on: until `resume`, or until the pause ends by itself."""
        self._count()
        self._paused_until = self._clock() + lease_seconds

    def resume(self) -> None:
        """The pause has ended, if there was one."""
        self._count()
        self._paused_until = None

    def gauges(self) -> dict[str, float]:
        """engine_busy_seconds and engine_paused_seconds so far; engine_state: 0 idle now, 1 busy, 2 paused."""
        self._count()
        paused = self._paused_until is not None
        state = 2.0 if paused else 1.0 if self._requests else 0.0
        return dict(zip(GAUGES, (self._busy, self._paused, state), strict=True))

    def _count(self) -> None:
        """Add up what has passed since the last change."""
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
