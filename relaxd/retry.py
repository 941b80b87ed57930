"""Exponential back-off between attempts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Backoff:
    """Pauses that start at `first_seconds` and double up to `max_seconds`."""

    first_seconds: float
    max_seconds: float = float("inf")

    def pause(self, failures: int) -> float:
        """Return the seconds to wait after this many failures in a row, counted from 1."""
        return min(self.first_seconds * 2.0 ** min(failures - 1, 64), self.max_seconds)
