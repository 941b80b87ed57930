"""Number of rollout replicas during a rehearsal, and the autoscaler's decisions that changed it."""

from dataclasses import dataclass, field

from relaxd.v1.scaling_pb2 import Autoscaler

SHOWN = 10
"""Maximum number of decisions, and of numbers of replicas, to report."""


@dataclass
class EngineNumbers:
    """Changes of the number of rollout replicas, and decisions of the autoscaler. Times are monotonic, in seconds."""

    changes: list[tuple[float, int]]
    """Times and numbers from then on; the first is the start of the run."""
    mode: str = "off"
    """autoscale.mode of the run; with "off" the number never changes."""
    decisions: list[tuple[float, str]] = field(default_factory=list)
    """Times and texts."""

    @property
    def last(self) -> int:
        """Number of rollout replicas at the end."""
        return self.changes[-1][1]

    @property
    def most(self) -> int:
        """Maximum number of rollout replicas."""
        return max(number for _, number in self.changes)

    def observe(self, time: float, found: Autoscaler) -> None:
        """Add what the autoscaler shows at a time that isn't earlier than the one before."""
        if found.replicas != self.last:
            self.changes.append((time, found.replicas))
        new = max(0, len(found.decisions) - len(self.decisions))
        for one in reversed(found.decisions[:new]):
            text = f"{one.replicas} to {one.wanted_replicas}{'' if one.request_id else ' (not done)'}: {one.reason}"
            self.decisions.append((time, text))

    def mean(self, begin: float, end: float) -> float:
        """Return the mean number between two times, the second of which is later."""
        return sum(number * seconds for number, seconds in self._spans(begin, end)) / (end - begin)

    def row(self, begin: float, end: float) -> str:
        """Return the numbers between two times and the decisions until the second one, for the report.

        The decisions have their seconds since the start of the run, like the lines of progress.
        """
        numbers = [f"{number} for {seconds:.0f} s" for number, seconds in self._spans(begin, end) if seconds >= 0.5]
        decided = [f"at {time - self.changes[0][0]:.0f} s {text}" for time, text in self.decisions if time <= end]
        return f"{_shown(numbers, ', ')}. Decisions: {_shown(decided, '; ') or 'none'}"

    def _spans(self, begin: float, end: float) -> list[tuple[int, float]]:
        """Return the numbers between two times, each with its seconds."""
        ends = [*(time for time, _ in self.changes[1:]), end]
        cut = (
            (number, min(until, end) - max(since, begin))
            for (since, number), until in zip(self.changes, ends, strict=True)
        )
        return [(number, seconds) for number, seconds in cut if seconds > 0]


def _shown(parts: list[str], separator: str) -> str:
    more = f"{len(parts) - SHOWN} earlier ones{separator}" if len(parts) > SHOWN else ""
    return more + separator.join(parts[-SHOWN:])
