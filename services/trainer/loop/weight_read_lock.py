"""Who may change or send the weights: the optimizer and a broadcast take turns."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class HoldRefused(Exception):
    """The weights can't be held; the message says why."""


class WeightReadLock:
    """Keeps the optimizer from changing the weights while a broadcast sends them, for a bounded time.

    Only rank 0 has one: no rank's optimizer steps before rank 0 says so.
    """

    def __init__(self, term: int) -> None:
        self._term = term
        self._condition = threading.Condition()
        self._version: int | None = None
        self._held_until = 0.0
        self._hold = 0

    @property
    def version(self) -> int | None:
        """The version that may be sent; None while there is none, or while it changes."""
        return self._version

    def publish(self, version: int) -> None:
        """From now on this version may be sent."""
        with self._condition:
            self._version = version

    def acquire(self, term: int, version: int, seconds: float) -> int:
        """Keep the weights as they are for at most `seconds`. Returns what to give to `release`.

        Raises:
            HoldRefused: these aren't the weights that are there, or they are just being changed.
        """
        with self._condition:
            if (term, version) != (self._term, self._version):
                now = "being changed" if self._version is None else f"({self._term}, {self._version})"
                raise HoldRefused(f"weights (term, version) are {now}: ({term}, {version}) can't be sent")
            self._hold += 1
            self._held_until = time.monotonic() + seconds
            return self._hold

    def release(self, hold: int) -> bool:
        """End a hold. Returns whether the weights stayed as they were until now."""
        with self._condition:
            if hold != self._hold:
                return False
            in_time = time.monotonic() <= self._held_until
            self._held_until = 0.0
            self._condition.notify_all()
            return in_time

    @contextmanager
    def changing(self, tick: Callable[[], None], tick_seconds: float) -> Iterator[float]:
        """Wait until nobody holds the weights, then keep everybody from it inside the block.

        `tick` is called about every `tick_seconds` while waiting. Afterwards no version may be sent until `publish`.
        Yields the seconds that were waited.
        """
        started = time.monotonic()
        with self._condition:
            while (left := self._held_until - time.monotonic()) > 0:
                self._condition.wait(min(left, tick_seconds))
                tick()
            self._version = None
            self._hold += 1
        yield time.monotonic() - started
