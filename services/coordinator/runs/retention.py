"""How long Redis remembers runs that have ended. Their folders stay."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from services.coordinator.state.records import RunRecord


@dataclass(frozen=True)
class Retention:
    """Runs that have ended are forgotten beyond these limits, the oldest first; the newest one is always kept."""

    runs: int
    bytes: int
    """Of all ended runs together."""
    days: float
    """Since the run ended."""

    def expired(self, runs: Sequence[tuple[RunRecord, int]], now: datetime) -> list[str]:
        """The ids of runs to forget. `runs`: every run, newest first, with the bytes that it takes in Redis."""
        forget = []
        kept, taken = 0, 0
        for record, size in runs:
            if not record.phase.ended:
                continue
            ended = record.end_time or record.create_time
            too_many = kept >= self.runs or taken + size > self.bytes or now - ended > timedelta(days=self.days)
            if kept and too_many:
                forget.append(record.run_id)
            else:
                kept, taken = kept + 1, taken + size
        return forget
