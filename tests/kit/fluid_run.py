"""A fluid model of an asynchronous run, on which the autoscaler's policy is tried without engines."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from relaxd.config.role_settings import AutoscaleConfig
from services.coordinator.scaling.autoscale_policy import AutoscalePolicy, Sample

TICK_SECONDS = 5
"""Seconds between two looks of the policy."""


@dataclass(frozen=True)
class Load:
    """Load of a run at one time."""

    engine_rate: float = 0.1
    """Groups per second of one engine."""
    train_seconds: float = 60.0
    """Of a step."""


@dataclass
class FluidRun:
    """Engines that make groups at a rate, a trainer that takes a step's groups in `train_seconds`, and a gate."""

    start: int
    """Engines at the start, which are all removable."""
    load: Callable[[float], Load]
    """The load at a second."""
    groups_per_step: int = 60
    max_staleness: int = 1
    noise: float = 0.05
    """Standard deviation of the engines' speed, relative."""
    start_seconds: float = 60.0
    """Time until a new engine works."""
    settings: AutoscaleConfig = field(default_factory=lambda: AutoscaleConfig(mode="on", max_replicas=32))
    fixed: bool = False
    """Leave the number of engines as it is."""

    def run(self, seconds: int, seed: int = 0) -> "FluidResult":
        """Run for some seconds."""
        rng, policy = random.Random(seed), AutoscalePolicy(self.settings)
        engines, coming, ready, lacked = self.start, [float("inf")], 0.0, 0.0
        result = FluidResult()
        for second in range(0, seconds, TICK_SECONDS):
            load = self.load(second)
            while coming[0] <= second:
                coming.pop(0)
                engines += 1
            room = (1 + self.max_staleness) * self.groups_per_step - ready
            able = TICK_SECONDS * engines * load.engine_rate * max(0.0, 1 + rng.gauss(0, self.noise))
            made = min(able, max(0.0, room))
            wanted = TICK_SECONDS * self.groups_per_step / load.train_seconds
            used = min(wanted, ready + made)
            ready += made - used
            # A tick is idle or it isn't: the shares come out right over time.
            lacked += 1 - used / wanted
            lacking = lacked >= 1
            lacked -= lacking
            shut = made < able
            sample = Sample(
                at=float(second),
                replicas=engines,
                removable=engines,
                busy=made / able if able else None,
                lacking=lacking,
                waiting=0 if shut else 1,
                gate="staleness" if shut else "",
                tokens_per_second=made,
                hold="a scale request is in progress" if len(coming) > 1 else "",
            )
            result.trained += used
            result.engine_seconds += TICK_SECONDS * (engines + len(coming) - 1)
            if self.fixed:
                continue
            verdict = policy.observe(sample)
            if verdict.wanted != engines:
                policy.acted(verdict)
                result.decisions.append((second, engines, verdict.wanted))
                coming = [second + self.start_seconds] * max(0, verdict.wanted - engines) + coming
                engines = min(engines, verdict.wanted)
        result.engines = engines
        return result


@dataclass
class FluidResult:
    """What came of it."""

    engines: int = 0
    """Engines at the end."""
    trained: float = 0.0
    """Groups."""
    engine_seconds: float = 0.0
    decisions: list[tuple[int, int, int]] = field(default_factory=list)
    """Second, engines before, engines wanted."""
