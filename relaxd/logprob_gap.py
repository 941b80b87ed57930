"""The alarm for a log-prob gap: engine and trainer differ under the same weights (docs/mismatch.md)."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relaxd.config import RunConfig

METRIC = "logprob_difference"
"""Step metric that measures the log-prob gap: mean absolute difference over tokens generated under the trainer's own
weights."""
FIRST_STEPS = 5
"""Number of steps, from the first that measures a log-prob gap, whose median is the run's usual gap."""
RECENT_STEPS = 3
"""Number of recent steps whose median log-prob gap is compared with the limit. A median lets no single step raise an
alarm."""
FACTOR = 10.0
"""Multiple of the run's usual log-prob gap above which an alarm is raised."""


@dataclass(frozen=True)
class Precision:
    """Limits of the log-prob gap for one element type, in nats."""

    name: str
    limit: float
    """Log-prob gap above which an alarm is always raised, in nats."""
    smallest: float
    """Lower bound of the usual log-prob gap, in nats. Smaller gaps are rounding errors, which may grow tenfold without
    harm."""


FLOAT32 = Precision("float32", limit=1e-3, smallest=1e-6)
BFLOAT16 = Precision("bf16", limit=0.05, smallest=1e-3)


@dataclass(frozen=True)
class GapAlarm:
    """An alarm for a log-prob gap, open or ended."""

    first_step: int
    last_step: int
    gap: float
    """Largest log-prob gap since the alarm began, in nats."""
    limit: float
    """The limit that `gap` exceeded, in nats."""
    basis: str
    """Words for the rule that gave the limit, such as "the limit in bf16"."""

    @property
    def text(self) -> str:
        """Message of the alarm: the log-prob gap, the limit and what to check."""
        return (
            f"under equal weights the log-probs of engine and trainer differ by {self.gap:.2g} on average, more than "
            f"{self.limit:.2g} ({self.basis}): look whether the model's config.json fits its weights, whether the "
            "engine was started with other options, and whether weights arrive "
            "(docs/mismatch.md, When the gap is an alarm)"
        )


class GapWatch:
    """Watches the log-prob gap of one run, step by step, and opens and ends its alarm."""

    def __init__(self, config: RunConfig) -> None:
        low = "bfloat16" in (config.trainer.dtype, config.rollout.dtype)
        self._precision = BFLOAT16 if low else FLOAT32
        self._first: list[tuple[int, float]] = []
        self._recent: list[tuple[int, float]] = []
        self.alarm: GapAlarm | None = None
        """The open alarm; None while the log-prob gap is normal."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Update the alarm by the metrics of a step. A repeated step replaces its earlier metrics and those of all
        later steps."""
        gap = metrics.get(METRIC)
        if gap is None or math.isnan(gap):  # no token could be compared
            return
        self._first = [one for one in self._first if one[0] < step]
        self._recent = [*(one for one in self._recent if one[0] < step), (step, float(gap))][-RECENT_STEPS:]
        if len(self._first) < FIRST_STEPS:
            self._first.append((step, float(gap)))
        now = statistics.median(value for _, value in self._recent)
        limit, basis = self._limit()
        if now <= limit:
            self.alarm = None
            return
        before = self.alarm if self.alarm is not None and self.alarm.first_step <= step else None
        if before is not None and before.gap >= now:
            now, limit, basis = before.gap, before.limit, before.basis
        self.alarm = GapAlarm(before.first_step if before is not None else step, step, now, limit, basis)

    def observe_all(self, lines: Iterable[Mapping[str, Any]]) -> list[GapAlarm]:
        """Observe all lines of metrics.jsonl. Returns every alarm that they raised, ended ones included."""
        found: dict[int, GapAlarm] = {}
        for line in lines:
            self.observe(line.get("step", 0), line)
            if self.alarm is not None:
                found[self.alarm.first_step] = self.alarm
        return list(found.values())

    def _limit(self) -> tuple[float, str]:
        """Return the limit of the log-prob gap in nats, and words for the rule that gave this limit."""
        precision = self._precision
        if len(self._first) == FIRST_STEPS:
            usual = max(precision.smallest, statistics.median(value for _, value in self._first))
            if FACTOR * usual < precision.limit:
                return FACTOR * usual, f"{FACTOR:.0f} times the gap of the run's first steps"
        return precision.limit, f"the limit in {precision.name}"
