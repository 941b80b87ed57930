"""Arithmetic: does this machine carry a rehearsal, and at which scale?

At rest it costs processors, and each step costs processor seconds, however fast steps come. A time scale at which both
need more than this machine has doesn't show how long steps take, but how slow the machine is.
"""

import math
from dataclasses import dataclass

BUSY_MACHINE = 0.9
"""Busy share of a machine's processors above which the machine itself has slowed the rehearsal down."""
SHARE = 0.8
"""Share of a machine's processors that a rehearsal may need."""


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """Load of a rehearsal on its machine: needed and measured."""

    cores: int
    """Processors of the machine."""
    machine_share: float
    """Busy share of all processors."""
    idle_cores: float
    """Processors that the rehearsal needs at rest."""
    step_seconds: float
    """Processor seconds per step."""
    least_step_seconds: float
    """Minimum seconds of a step, at the run's own speed."""
    time_scale: float
    replicas: int
    """Rollout replicas."""

    @property
    def needed(self) -> float:
        """Number of processors that the rehearsal would need to reach its time scale."""
        return self.idle_cores + self.step_seconds * self.time_scale / self.least_step_seconds

    @property
    def largest_time_scale(self) -> float:
        """The largest time scale that this machine carries; less than 1: none."""
        free = SHARE * self.cores - self.idle_cores
        return free * self.least_step_seconds / self.step_seconds if self.step_seconds > 0 else math.inf


def refusal(load: HostLoad) -> str:
    """Return the reason why the steps' seconds are meaningless, with better numbers; "" if this machine was fast
    enough."""
    if load.machine_share <= BUSY_MACHINE or load.needed <= SHARE * load.cores:
        return ""
    why = (
        f"this machine can't carry this scale: at --time-scale {load.time_scale:g} the rehearsal needs "
        f"{load.needed:.2g} processors, and {load.cores} are here"
    )
    if (most := _rounded_down(load.largest_time_scale)) >= 1:
        seconds = math.ceil(2 * load.least_step_seconds / most)
        return f"{why}. --time-scale {most:g} --seconds {seconds} would do"
    processors = math.ceil((load.idle_cores + load.step_seconds / load.least_step_seconds) / SHARE)
    fewer = max(1, int(load.replicas * SHARE * load.cores / 2 / max(load.idle_cores, 1e-9)))
    less = f", or --rollout {fewer}" if fewer < load.replicas else ", or a larger --payload-scale"
    return f"{why}. No time scale would do: it takes {processors} processors{less}"


def doubt(load: HostLoad, own_share: float) -> str:
    """Return the reason why the steps' seconds are only upper bounds; "" if nothing waited for a processor."""
    if load.machine_share <= BUSY_MACHINE:
        return ""
    return (
        f"this machine's processors were {load.machine_share:.0%} busy ({own_share:.0%} with the rehearsal, which "
        f"needs {load.needed:.2g} of {load.cores}), so steps may have taken longer than they would: rehearse while "
        "nothing else runs here, or use a smaller --time-scale"
    )


def advice(machine_share: float) -> str:
    """Return advice for a rehearsal in which no step ended."""
    if machine_share > BUSY_MACHINE:
        return (
            "a smaller --time-scale with a longer --seconds, a larger --payload-scale, or fewer --rollout replicas: "
            f"this machine's processors were {machine_share:.0%} busy"
        )
    return "a longer --seconds, a larger --time-scale, or more --rollout replicas"


def _rounded_down(value: float) -> float:
    """Return a value rounded down to two digits."""
    if not 1 <= value < math.inf:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / unit) * unit
