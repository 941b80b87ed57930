"""Rules on the numbers of steps, such as "reward_mean < 0.5 x highest over 10 steps" (docs/alerts.md)."""

import math
import operator
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 5
"""Default number of steps whose median a rule compares, so that one odd step raises no alarm."""
MAX_STEPS = 1000
FORM = (
    'expected "METRIC < NUMBER" or "METRIC > NUMBER", then perhaps "x highest" or "x lowest", and "over N steps", such '
    'as "reward_mean < 0.5 x highest over 10 steps" or "kl > 0.2"'
)
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RULE = re.compile(
    rf"(?P<metric>[^\s<>=]+)\s*(?P<sign>[<>])\s*(?P<number>{_NUMBER})(?:\s*x\s*(?P<best>highest|lowest))?"
    r"(?:\s+over\s+(?P<steps>\d{1,9})\s+steps?)?"
)


@dataclass(frozen=True)
class Rule:
    """Rule that raises an alarm when a metric's median over some steps passes a limit."""

    text: str
    metric: str
    below: bool
    """True if the alarm is for values below the limit, False for values above it."""
    number: float
    """The limit if `relative` is False, else the factor by which the run's best median is multiplied."""
    relative: bool
    """True if the limit is a multiple of the run's highest median so far or, with `below` False, of the lowest."""
    steps: int
    """Number of steps whose median is compared with the limit."""


def parse_rule(text: str) -> Rule:
    """Parse a rule such as "grad_norm > 10". Raises ValueError that says what is wrong."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        raise ValueError(FORM)
    below, best, number = match["sign"] == "<", match["best"], float(match["number"])
    if best is not None and below != (best == "highest"):
        raise ValueError(f'"{match["sign"]}" goes with "x {"highest" if below else "lowest"}"')
    if best is not None and not (0 < number < 1 if below else number > 1):
        raise ValueError(f'the factor of "x {best}" must be {"between 0 and 1" if below else "above 1"}')
    steps = int(match["steps"] or STEPS)
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps must be 1 to {MAX_STEPS}")
    return Rule(text.strip(), match["metric"], below, number, best is not None, steps)


@dataclass(frozen=True)
class RuleAlarm:
    """Alarm that a rule raised: still open, or ended."""

    rule: Rule
    first_step: int
    last_step: int
    value: float
    """Worst median of the metric since the alarm began: the median furthest beyond the limit."""
    limit: float
    """Limit that applied at the step of the worst median."""

    @property
    def text(self) -> str:
        """Sentence for people with the metric's worst median, its limit and the rule."""
        side = "below" if self.rule.below else "above"
        return f"{self.rule.metric} is {self.value:.4g}, {side} {self.limit:.4g} (alerts.rules: {self.rule.text})"


class RuleWatch:
    """Watches one rule of one run, step by step."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._recent: list[tuple[int, float]] = []
        self._best: list[tuple[int, float]] = []
        """Step and median, for each step whose median was the run's best so far."""
        self.alarm: RuleAlarm | None = None
        """The rule's open alarm; None if no alarm is open."""

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Process the metrics of a step. A repeated step replaces its earlier metrics and those of all later steps."""
        value = metrics.get(self.rule.metric)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return
        rule, beyond = self.rule, operator.lt if self.rule.below else operator.gt
        self._recent = [*(one for one in self._recent if one[0] < step), (step, float(value))][-rule.steps :]
        self._best = [one for one in self._best if one[0] < step]
        before = self.alarm if self.alarm is not None and self.alarm.first_step <= step else None
        self.alarm = None
        if len(self._recent) < rule.steps:
            return
        now = statistics.median(value for _, value in self._recent)
        if rule.relative:
            if not self._best or beyond(self._best[-1][1], now):
                self._best.append((step, now))
            if self._best[-1][1] <= 0:  # a share of it is no useful limit
                return
        limit = rule.number * self._best[-1][1] if rule.relative else rule.number
        if not beyond(now, limit):
            return
        if before is not None and not beyond(now, before.value):
            now, limit = before.value, before.limit
        self.alarm = RuleAlarm(rule, before.first_step if before is not None else step, step, now, limit)

    def observe_all(self, lines: Iterable[Mapping[str, Any]]) -> list[RuleAlarm]:
        """Process lines of metrics.jsonl. Returns the alarms, ended ones included."""
        found: dict[int, RuleAlarm] = {}
        for line in lines:
            self.observe(line.get("step", 0), line)
            if self.alarm is not None:
                found[self.alarm.first_step] = self.alarm
        return list(found.values())
