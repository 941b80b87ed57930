"""The autoscaler's policy: how many rollout replicas a run needs, from samples of the last seconds. Pure.

The trainer's idle share tells how many replicas are missing: with n replicas and an idle share s, n / (1 - s) would
keep it busy. Each rule is a table of conditions on means over its window, all of which must hold. So every decision can
be explained, including a decision not to act.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from relaxd.config.role_settings import AutoscaleConfig

IDLE_OUT, IDLE_IN = 0.15, 0.05
"""Idle shares of the trainer. Above IDLE_OUT, replicas may be added. Above IDLE_IN, a replica is removed only if the
engines are also idle while the trainer waits."""
BUSY_OUT, BUSY_IN, BUSY_AHEAD = 0.9, 0.6, 0.9
"""Busy shares of the engines. Above BUSY_OUT, replicas may be added. A replica is removed if the busy share of the rest
would stay below BUSY_IN, or below BUSY_AHEAD if the engines are so far ahead that the gate is shut."""
MOST_AT_ONCE = 4
"""Maximum number of replicas to add at once."""
WORTH = 0.5
"""Minimum share of the expected gain in tokens per second that added replicas must bring to be worth it. Judged only
while the engines stay busy."""
NOT_WORTH_SECONDS = 600.0
"""Seconds for which no replicas are added after an addition that was not worth it."""
GAP_SECONDS = 10.0
"""Maximum seconds between two samples of one averaging window; after a longer gap the window restarts."""
FULL = ("memory", "full", "complete", "closed")
"""Limits of the admission gate (`relaxd.board.Admission.limit`) at which more engines wouldn't help."""


@dataclass(frozen=True)
class Sample:
    """State of a run at one moment, sampled about once a second."""

    at: float
    """Clock time of the sample, in seconds."""
    replicas: int
    """Number of rollout replicas that aren't draining."""
    removable: int
    """Number of rollout replicas that the autoscaler may remove."""
    busy: float | None
    """Share of the last second in which engines had samples in progress, as a mean over engines; None if none has
    reported."""
    lacking: bool
    """True if the open step lacks groups, so that the trainer waits."""
    waiting: int
    """Number of groups and samples that wait for an engine."""
    gate: str
    """Name of the limit that closes the admission gate; empty while the gate is open."""
    tokens_per_second: float
    """Tokens per second that all engines generate together."""
    hold: str = ""
    """Reason why no scaling decision is possible now, such as a pause; empty if one is possible."""


@dataclass(frozen=True)
class Condition:
    """One condition of a scaling rule: compares a mean over a window with a threshold."""

    rule: str
    """Rule that needs the condition: "out" adds replicas, "in" removes one."""
    name: str
    value: float
    threshold: float
    above: bool
    """True if the value must be above the threshold; False if it must be below."""

    @property
    def holds(self) -> bool:
        """True if the value is on the required side of the threshold."""
        return self.value > self.threshold if self.above else self.value < self.threshold


@dataclass(frozen=True)
class Verdict:
    """Number of replicas that the policy wants at one moment, and why."""

    wanted: int
    """Number of rollout replicas that the policy wants."""
    reason: str
    """Sentence for people: why replicas are added or removed, or why neither."""
    conditions: tuple[Condition, ...] = ()
    """Conditions of both rules, as far as their windows have enough samples."""


@dataclass
class _Trial:
    """The last addition of replicas, kept to judge whether it was worth it."""

    replicas: int
    """Number of replicas before the addition."""
    tokens_per_second: float
    """Tokens per second of all engines before the addition."""


@dataclass
class AutoscalePolicy:
    """Decides how many rollout replicas a run needs, from its samples and the decisions so far."""

    settings: AutoscaleConfig
    _samples: deque[Sample] = field(default_factory=deque)
    _last_out: float = float("-inf")
    _last_in: float = float("-inf")
    _no_out_until: float = float("-inf")
    _trial: _Trial | None = None

    def observe(self, sample: Sample) -> Verdict:
        """Add a sample and return the desired number of replicas. Call it about once a second."""
        if sample.hold:
            self._samples.clear()
            return Verdict(sample.replicas, sample.hold)
        if self._samples:
            last = self._samples[-1]
            if sample.at - last.at > GAP_SECONDS or sample.replicas != last.replicas:
                self._samples.clear()
        self._samples.append(sample)
        while sample.at - self._samples[0].at > max(self.settings.out_seconds, self.settings.in_seconds):
            self._samples.popleft()
        if sample.replicas < self.settings.min_replicas:
            reason = f"autoscale.min_replicas is {self.settings.min_replicas}"
            return Verdict(self.settings.min_replicas, reason)
        self._judge_last_out()
        out, into = self._out(sample), self._in(sample)
        conditions = (*out.conditions, *into.conditions)
        chosen = next((one for one in (out, into) if one.wanted != sample.replicas), None)
        if chosen is None:
            reason = "; ".join(f"{name}: {one.reason}" for name, one in (("out", out), ("in", into)))
            return Verdict(sample.replicas, reason, conditions)
        return Verdict(chosen.wanted, chosen.reason, conditions)

    def acted(self, verdict: Verdict) -> None:
        """Start the cooldown and a new window, because the verdict is being executed (or would be, in a dry run)."""
        last = self._samples[-1] if self._samples else None
        if last is None:
            return
        if verdict.wanted > last.replicas:
            window = self._window(self.settings.out_seconds)
            speed = _mean([one.tokens_per_second for one in window])
            self._last_out, self._trial = last.at, _Trial(last.replicas, speed)
        else:
            self._last_in = last.at
        self._samples.clear()

    def _out(self, sample: Sample) -> Verdict:
        """Return the verdict of the rule that adds replicas, or the current number if it doesn't apply."""
        window, now, replicas = self._window(self.settings.out_seconds), sample.at, sample.replicas
        if not window:
            return Verdict(replicas, f"watched for less than {self.settings.out_seconds:g} s")
        lacking = [one for one in window if one.lacking]
        idle = len(lacking) / len(window)
        conditions = (
            Condition("out", "trainer idle", idle, IDLE_OUT, above=True),
            Condition("out", "engines busy meanwhile", _busy(lacking), BUSY_OUT, above=True),
            Condition("out", "of it with groups waiting", _waited(lacking), 0.5, above=True),
            Condition("out", "gate shut for all", _mean([one.gate in FULL for one in window]), 0.5, above=False),
        )
        if missing := [one.name for one in conditions if not one.holds]:
            return Verdict(replicas, f"not so: {', '.join(missing)}", conditions)
        if replicas >= self.settings.max_replicas:
            return Verdict(replicas, f"autoscale.max_replicas is {self.settings.max_replicas}", conditions)
        if now < self._no_out_until:
            left = self._no_out_until - now
            return Verdict(replicas, f"the last ones brought too little: none for {left:.0f} s", conditions)
        if now - self._last_out < self.settings.out_cooldown_seconds:
            return Verdict(replicas, "replicas were added a short time ago", conditions)
        more = round(replicas * idle / (1 - min(idle, 0.8)))
        wanted = min(replicas + min(max(more, 1), MOST_AT_ONCE), self.settings.max_replicas)
        return Verdict(wanted, f"the trainer waits for busy engines {idle:.0%} of the time", conditions)

    def _in(self, sample: Sample) -> Verdict:
        """Return the verdict of the rule that removes a replica, or the current number if it doesn't apply."""
        window, now, replicas = self._window(self.settings.in_seconds), sample.at, sample.replicas
        if not window:
            return Verdict(replicas, f"watched for less than {self.settings.in_seconds:g} s")
        if all(one.busy is None for one in window):
            return Verdict(replicas, "no engine says how busy it is")
        lacking = [one for one in window if one.lacking]
        ahead = _mean([one.gate == "staleness" for one in window]) > 0.5
        limit, growth = BUSY_AHEAD if ahead else BUSY_IN, replicas / max(1, replicas - 1)
        without = _busy(window) * growth
        conditions = [Condition("in", "engines busy with one less", without, limit, above=False)]
        if len(lacking) > IDLE_IN * len(window):  # the trainer waits: for engines, or for what comes after them
            meanwhile = _busy(lacking) * growth
            conditions.append(Condition("in", "the same while the trainer waits", meanwhile, limit, above=False))
        if not ahead:
            conditions.append(Condition("in", "groups waiting", _waited(window), 0.5, above=False))
        if missing := [one.name for one in conditions if not one.holds]:
            return Verdict(replicas, f"not so: {', '.join(missing)}", tuple(conditions))
        if replicas <= self.settings.min_replicas:
            return Verdict(replicas, f"autoscale.min_replicas is {self.settings.min_replicas}", tuple(conditions))
        if not sample.removable:
            return Verdict(replicas, "none was scaled out", tuple(conditions))
        if now - max(self._last_out, self._last_in) < self.settings.in_cooldown_seconds:
            return Verdict(replicas, "replicas were added or removed a short time ago", tuple(conditions))
        return Verdict(replicas - 1, f"engines would be {without:.0%} busy with one less", tuple(conditions))

    def _window(self, seconds: float) -> list[Sample]:
        """Return the samples of the last `seconds`; none if the samples don't reach that far back."""
        now = self._samples[-1].at
        if now - self._samples[0].at < seconds - 1:
            return []
        return [one for one in self._samples if now - one.at <= seconds]

    def _judge_last_out(self) -> None:
        """Compare the engines' speed with that before the last addition of replicas. After a small gain none are added
        for NOT_WORTH_SECONDS.

        Engines that have become idle don't count: their speed says nothing about a load that grows again.
        """
        trial, window = self._trial, self._window(self.settings.out_seconds)
        if trial is None or not window or window[-1].replicas <= trial.replicas:
            return
        self._trial = None
        if _busy(window) <= BUSY_OUT:
            return
        promised = window[-1].replicas / trial.replicas - 1
        speed = _mean([one.tokens_per_second for one in window])
        if trial.tokens_per_second and speed < trial.tokens_per_second * (1 + WORTH * promised):
            self._no_out_until = window[-1].at + NOT_WORTH_SECONDS


def _busy(samples: Sequence[Sample]) -> float:
    """Return the mean busy share of the engines; 0 if none has reported."""
    return _mean([one.busy for one in samples if one.busy is not None])


def _waited(samples: Sequence[Sample]) -> float:
    """Return the share of samples in which groups waited for an engine."""
    return _mean([one.waiting > 0 for one in samples])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
