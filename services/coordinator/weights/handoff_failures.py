"""Replicas that fail to sleep or wake up in a colocated run, and for how long they have."""

import time
from collections.abc import Callable
from dataclasses import dataclass

PATIENCE = 3
"""Factor on run.switch_timeout_seconds: a process that has failed for longer is given up."""


@dataclass(frozen=True)
class HandoffFailure:
    """The calls in a row that one process failed."""

    action: str
    """The failed action, such as "wake up"."""
    error: str
    """Error of the last call."""
    began: float
    ended: float
    """When the first call began and the last one ended; times are the clock's."""

    @property
    def seconds(self) -> float:
        """Seconds of known failure, without those in which nothing was requested."""
        return self.ended - self.began

    def __str__(self) -> str:
        return f"it has not been able to {self.action} for {self.seconds:.0f} s: {self.error}"


class HandoffFailures:
    """Counts the time for which processes have failed; a new process of an instance begins anew."""

    def __init__(self, switch_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = PATIENCE * switch_timeout_seconds
        self._clock = clock
        self._failures: dict[str, HandoffFailure] = {}

    def now(self) -> float:
        """Return the clock's time, for `began`."""
        return self._clock()

    def failed(self, replica_id: str, action: str, error: str, began: float) -> None:
        """Record a call that failed, and when it began."""
        before = self._failures.get(replica_id)
        first = before.began if before is not None and before.action == action else began
        self._failures[replica_id] = HandoffFailure(action, error, first, self._clock())

    def worked(self, replica_id: str) -> None:
        """Record a call that the replica answered."""
        self._failures.pop(replica_id, None)

    def of(self, replica_id: str) -> HandoffFailure | None:
        """Return the failure of a process; None if its last call worked."""
        return self._failures.get(replica_id)

    def given_up(self, replica_id: str) -> bool:
        """Return whether a process has failed for longer than it may: its health restarts it, and turns go on."""
        failure = self._failures.get(replica_id)
        return failure is not None and failure.seconds > self._limit_seconds
