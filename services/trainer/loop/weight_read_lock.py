"""Lock with a time limit that keeps the optimizer from changing weights that broadcasts read."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from relaxd.rpc.errors import Aborted, FailedPrecondition
from relaxd.weights import WEIGHTS_CHANGED

HOLD_MARGIN_SECONDS = 1.0
"""Seconds by which a hold on the weights outlasts the broadcast's deadline, so that weights never change while sent."""


class HoldRefused(FailedPrecondition):
    """The requested version of the weights can't be broadcast now."""


class WeightReadLock:
    """Keeps the optimizer from changing the weights while a broadcast sends them, for a limited time.

    Only rank 0 has one, because all ranks' optimizers wait for rank 0's command.
    """

    def __init__(self, term: int) -> None:
        self.term = term
        self._condition = threading.Condition()
        self._version: int | None = None
        self._changed_by = ""
        self._held_until = 0.0
        self._hold = 0

    @property
    def version(self) -> int | None:
        """Weight version that may be broadcast; None before the first version and while the weights change."""
        return self._version

    @property
    def changing(self) -> bool:
        """True while holds are refused because an update changes the weights, or the ranks sleep."""
        return self._version is None and bool(self._changed_by)

    def publish(self, version: int) -> None:
        """Allow broadcasts of the weights, which now have this version."""
        with self._condition:
            self._version = version

    def acquire(self, term: int, version: int, seconds: float) -> int:
        """Hold the weights unchanged for at most `seconds`. Returns the hold's number, for `release`.

        Raises:
            HoldRefused: the current weights are another version, or are being changed.
        """
        with self._condition:
            if (term, version) != (self.term, self._version):
                now = f"the trainer has ({self.term}, {self._version})"
                if self._version is None:
                    now = f"the trainer is changing them ({self._changed_by})" if self._changed_by else "there are none"
                reason = WEIGHTS_CHANGED if term == self.term and self._is_past(version) else ""
                message = f"weights (term {term}, version {version}) can't be sent: {now}"
                raise HoldRefused(message, reason=reason, subject=f"version {version}")
            self._hold += 1
            self._held_until = time.monotonic() + seconds
            return self._hold

    def _is_past(self, version: int) -> bool:
        """Return True if `version` is outdated: the trainer has a newer version, or is making one."""
        return self.changing if self._version is None else self._version > version

    def release(self, hold: int) -> bool:
        """End a hold. Return True if it lasted until now, so that the weights are unchanged."""
        with self._condition:
            if hold != self._hold:
                return False
            in_time = time.monotonic() <= self._held_until
            self._held_until = 0.0
            self._condition.notify_all()
            return in_time

    @contextmanager
    def held(self, term: int, version: int, seconds: float) -> Iterator[None]:
        """Hold the weights unchanged during the block.

        Raises HoldRefused, or Aborted if the block took longer than `seconds`.
        """
        hold = self.acquire(term, version, seconds)
        try:
            yield
        finally:
            in_time = self.release(hold)
        if not in_time:
            raise Aborted(f"the weights were read for longer than {seconds:g} s")

    def begin_change(self, reason: str, tick: Callable[[], None], tick_seconds: float) -> float:
        """Wait for the current hold to end, then refuse holds until `publish`.

        Args:
            reason: reason for the change, for the errors of refused holds.
            tick: called about every `tick_seconds` while waiting.
            tick_seconds: interval of `tick`, in seconds.

        Returns:
            The seconds waited.
        """
        started = time.monotonic()
        with self._condition:
            while (left := self._held_until - time.monotonic()) > 0:
                self._condition.wait(min(left, tick_seconds))  # named: `tick` reports the wait
                tick()
            self._version, self._changed_by = None, reason
            self._hold += 1
        return time.monotonic() - started
