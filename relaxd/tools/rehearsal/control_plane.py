"""Load of the coordinator with this many replicas: its processor, and the times of its answers to the replicas' calls.

Heartbeats are judged at rest, where nothing is scaled. In the other window steps, and so weight synchronisations, come
`time_scale` times as often as they will: p99 there is an upper bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class AnsweredCall:
    """One answered call."""

    name: str
    """Heartbeat or LeaseGpus."""
    sent: float
    """Monotonic time, which all processes of a machine share."""
    seconds: float


def line(name: str, sent: float, seconds: float) -> str:
    """Return a call's line."""
    return f"{name} {sent:.6f} {seconds:.6f}\n"


def read_calls(folder: Path) -> list[AnsweredCall]:
    """Read the calls of all processes. An incomplete line is left out."""
    calls = []
    for path in sorted(folder.glob("*.txt")):
        whole, _, _ = path.read_text().rpartition("\n")
        for name, sent, seconds in map(str.split, whole.splitlines()):
            calls.append(AnsweredCall(name, float(sent), float(seconds)))
    return calls


def p99(seconds: Sequence[float]) -> float | None:
    """Return the 99th percentile; None without values."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))] if seconds else None


CORES = 1.0
"""Maximum processors that the coordinator should use."""
HEARTBEAT_SECONDS = 0.1
"""Maximum p99 of Heartbeat, in seconds."""
LEASE_SECONDS = 5.0
"""Maximum p99 seconds of LeaseGpus while all replicas lease at once: the call's deadline."""


@dataclass(frozen=True)
class CallTimes:
    """p99 of the replicas' calls to the coordinator, in seconds; None: there were none."""

    heartbeat_at_rest: float | None
    """p99 of heartbeats while the run was paused."""
    heartbeat_working: float | None
    """p99 of heartbeats during steps at `time_scale` times their speed."""
    lease: float | None
    """p99 of LeaseGpus while all replicas started."""


def call_times(calls: Sequence[AnsweredCall], working: tuple[float, float], rest: tuple[float, float]) -> CallTimes:
    """Return p99 of the calls that were sent in the two windows (monotonic times); of leases, all."""

    def heartbeats(window: tuple[float, float]) -> float | None:
        return p99([one.seconds for one in calls if one.name == "Heartbeat" and window[0] <= one.sent <= window[1]])

    return CallTimes(
        heartbeats(rest), heartbeats(working), p99([one.seconds for one in calls if one.name == "LeaseGpus"])
    )


def verdict(times: CallTimes, cores: float, replicas: int, *, busy_at_rest: bool) -> str:
    """Say whether the coordinator meets its goals.

    Args:
        times: what replicas waited for its answers.
        cores: processors that it uses at the run's own speed.
        replicas: rollout replicas.
        busy_at_rest: this machine had no processor left at rest either, so that calls also waited for that.
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
    """Return p99 of the calls, for the report."""
    parts = [
        f"Heartbeat p99 {_ms(times.heartbeat_at_rest)} at rest, "
        f"{_ms(times.heartbeat_working)} with steps {time_scale:g} times as fast",
        f"LeaseGpus p99 {_ms(times.lease)} while all started",
    ]
    return "; ".join(parts)


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:,.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
