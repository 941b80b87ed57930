"""Calculations of whether the coordinator can serve its replicas, and at which scale this machine can rehearse.

The coordinator is judged by its processor time and its response times to replicas' calls. Heartbeats are judged at
rest, where nothing is scaled. In the other window, steps and weight synchronisations are `time_scale` times as frequent
as in the real run, so p99 there is an upper bound.

The rehearsal uses some processors even at rest, and each step uses processor seconds at any speed. If both need more
than this machine has at a time scale, the measured steps show only how slow the machine is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AnsweredCall:
    """A replica's call to the coordinator that was answered."""

    name: str
    """Name of the called method: Heartbeat or LeaseGpus."""
    sent: float
    """Time of sending, in seconds of the monotonic clock, which all processes of a machine share."""
    seconds: float


def line(name: str, sent: float, seconds: float) -> str:
    """Format a call as a line of the files that `read_calls` reads."""
    return f"{name} {sent:.6f} {seconds:.6f}\n"


def read_calls(folder: Path) -> list[AnsweredCall]:
    """Read the answered calls that all processes wrote into a folder. Incomplete lines are skipped."""
    calls = []
    for path in sorted(folder.glob("*.txt")):
        whole, _, _ = path.read_text().rpartition("\n")
        for name, sent, seconds in map(str.split, whole.splitlines()):
            calls.append(AnsweredCall(name, float(sent), float(seconds)))
    return calls


def p99(seconds: Sequence[float]) -> float | None:
    """Return the 99th percentile of durations, in seconds; None if there are none."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))] if seconds else None


CORES = 1.0
"""Maximum number of processors that the coordinator should use."""
HEARTBEAT_SECONDS = 0.1
"""Maximum p99 of Heartbeat, in seconds."""
LEASE_SECONDS = 5.0
"""Maximum p99 seconds of LeaseGpus while all replicas lease at once: the call's deadline."""


@dataclass(frozen=True)
class CallTimes:
    """99th percentiles of the durations of replicas' calls to the coordinator, in seconds; None without calls."""

    heartbeat_at_rest: float | None
    """p99 of the Heartbeat calls while the run was paused, in seconds."""
    heartbeat_working: float | None
    """p99 of the Heartbeat calls while steps ran `time_scale` times as fast as in the real run, in seconds."""
    lease: float | None
    """p99 of the LeaseGpus calls while all replicas started, in seconds."""


def call_times(calls: Sequence[AnsweredCall], working: tuple[float, float], rest: tuple[float, float]) -> CallTimes:
    """Return p99 of the Heartbeat calls sent in each window (monotonic times), and of all LeaseGpus calls."""

    def heartbeats(window: tuple[float, float]) -> float | None:
        return p99([one.seconds for one in calls if one.name == "Heartbeat" and window[0] <= one.sent <= window[1]])

    return CallTimes(
        heartbeats(rest), heartbeats(working), p99([one.seconds for one in calls if one.name == "LeaseGpus"])
    )


def verdict(times: CallTimes, cores: float, replicas: int, *, busy_at_rest: bool) -> str:
    """Say whether the coordinator meets its goals.

    Args:
        times: times that replicas waited for the coordinator's answers.
        cores: processors that the coordinator uses at the run's own speed.
        replicas: number of rollout replicas.
        busy_at_rest: True if this machine had no idle processor at rest either, so that calls waited for one, too.
    """
    goals = [(f"uses {cores:.2g} of {CORES:g} cores", cores <= CORES)]
    if times.heartbeat_at_rest is not None:
        within = times.heartbeat_at_rest <= HEARTBEAT_SECONDS
        goals.append((f"p99 of Heartbeat {_ms(times.heartbeat_at_rest)} of {_ms(HEARTBEAT_SECONDS)}", within))
    if times.lease is not None:
        goals.append((f"p99 of LeaseGpus {_ms(times.lease)} of {_ms(LEASE_SECONDS)}", times.lease <= LEASE_SECONDS))
    missed = [text for text, met in goals if not met]
    numbers = "; ".join(text for text, _ in goals)
    if times.heartbeat_at_rest is None:
        return f"not judged: no heartbeat was answered in the window at rest ({numbers})"
    if cores <= CORES and missed and busy_at_rest:
        return f"not judged: this machine had no processor left, at rest either ({numbers})"
    if missed:
        return f"misses its goals with {replicas} rollout replicas: {'; '.join(missed)} (all: {numbers})"
    return f"meets its goals with {replicas} rollout replicas: {numbers}"


def calls_row(times: CallTimes, time_scale: float) -> str:
    """Format the 99th percentiles of the calls' durations as a row of the report."""
    parts = [
        f"Heartbeat p99 {_ms(times.heartbeat_at_rest)} at rest, "
        f"{_ms(times.heartbeat_working)} with steps {time_scale:g} times as fast",
        f"LeaseGpus p99 {_ms(times.lease)} while all started",
    ]
    return "; ".join(parts)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


BUSY_MACHINE = 0.9
"""Busy share of a machine's processors above which the machine itself has slowed the rehearsal down."""
SHARE = 0.8
"""Share of a machine's processors that a rehearsal may need."""


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """Processor load of a rehearsal on its machine: what the rehearsal needs, and what was measured."""

    cores: int
    """Number of processors of the machine."""
    machine_share: float
    """Share of the machine's processors that was busy, including other programs."""
    idle_cores: float
    """Number of processors that the rehearsal needs while its run is paused."""
    step_seconds: float
    """Processor seconds that the rehearsal needs per step."""
    least_step_seconds: float
    """Minimum seconds of a step, at the run's own speed."""
    time_scale: float
    replicas: int
    """Number of rollout replicas."""

    @property
    def needed(self) -> float:
        """Number of processors that the rehearsal would need to reach its time scale."""
        return self.idle_cores + self.step_seconds * self.time_scale / self.least_step_seconds

    @property
    def largest_time_scale(self) -> float:
        """The largest time scale for which this machine has enough processors; below 1, it cannot rehearse the run at
        all."""
        free = SHARE * self.cores - self.idle_cores
        return free * self.least_step_seconds / self.step_seconds if self.step_seconds > 0 else math.inf


def refusal(load: HostLoad) -> str:
    """Return why the measured step times are meaningless, with options that would work; "" if this machine was fast
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
    """Return why the measured step times are only upper bounds; "" if nothing waited for a processor."""
    if load.machine_share <= BUSY_MACHINE:
        return ""
    return (
        f"this machine's processors were {load.machine_share:.0%} busy ({own_share:.0%} with the rehearsal, which "
        f"needs {load.needed:.2g} of {load.cores}), so steps may have taken longer than they would: rehearse while "
        "nothing else runs here, or use a smaller --time-scale"
    )


def advice(machine_share: float) -> str:
    """Return advice on the options of a rehearsal in which no step ended."""
    if machine_share > BUSY_MACHINE:
        return (
            "a smaller --time-scale with a longer --seconds, a larger --payload-scale, or fewer --rollout replicas: "
            f"this machine's processors were {machine_share:.0%} busy"
        )
    return "a longer --seconds, a larger --time-scale, or more --rollout replicas"


def _rounded_down(value: float) -> float:
    """Return a value rounded down to two significant digits."""
    if not 1 <= value < math.inf:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.floor(value / unit) * unit
