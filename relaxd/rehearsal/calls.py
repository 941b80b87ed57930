"""Times of the calls that a rehearsal's replicas make: one line a call, in a file of each process."""

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
    """Read the calls of all processes. A line that is being written is left out."""
    calls = []
    for path in sorted(folder.glob("*.txt")):
        whole, _, _ = path.read_text().rpartition("\n")
        for name, sent, seconds in map(str.split, whole.splitlines()):
            calls.append(AnsweredCall(name, float(sent), float(seconds)))
    return calls


def p99(seconds: Sequence[float]) -> float | None:
    """Return the 99th percentile; None of nothing."""
    return sorted(seconds)[int(0.99 * (len(seconds) - 1))] if seconds else None
