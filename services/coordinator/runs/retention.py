"""Retention of ended runs in Redis; their folders stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.coordinator.state.records import RunRecord


@dataclass(frozen=True)
class Retention:
    """Limits on ended runs in Redis: the oldest are deleted first, and the newest is always kept."""

    runs: int
    bytes: int
    """Total of all ended runs."""
    days: float
    """Age since the end of the run."""

    def expired(self, runs: Sequence[tuple[RunRecord, int]], now: datetime) -> list[str]:
        """Return the ids of runs to delete. `runs`: all runs, newest first, each with its bytes in Redis."""
        expired = []
        kept, taken = 0, 0
        for record, size in runs:
            if not record.phase.ended:
                continue
            ended = record.end_time or record.create_time
            too_many = kept >= self.runs or taken + size > self.bytes or now - ended > timedelta(days=self.days)
            if kept and too_many:
                expired.append(record.run_id)
            else:
                kept, taken = kept + 1, taken + size
        return expired
