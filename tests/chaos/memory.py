"""Memory of every service over time, and whether it grows."""

import math
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil
import redis

from tests.chaos.stack import ChaosStack

SAMPLE_SECONDS = 5.0
WARM_UP_SECONDS = 60.0
"""Of a process's life that don't count: imports, caches, first steps."""


@dataclass(frozen=True)
class Sample:
    """One look at one process, or at Redis's own count."""

    time: float
    """Unix time."""
    life: tuple[int, float]
    """Process id and start time: what was restarted begins anew."""
    megabytes: float


@dataclass
class Slope:
    """Growth by least squares, with an own level for every life."""

    megabytes_per_hour: float
    error: float
    """Standard error."""
    hours: float
    """Of observation, all lives together."""
    last: float
    """Megabytes at the end."""


@dataclass
class Memory:
    """Looks every few seconds, in a thread. A context manager."""

    stack: ChaosStack
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By service and module; "redis: used_memory" is what Redis says itself."""

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory", daemon=True)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.look()

    def look(self) -> None:
        """Take one sample of everything."""
        state = self.stack.state.read()
        now = time.time()
        for service in state.services if state else ():
            for process in self.stack.tree(service.name):
                try:
                    name = f"{service.name}: {_module(process)}"
                    life = (process.pid, process.create_time())
                    self.samples[name].append(Sample(now, life, process.memory_info().rss / 2**20))
                except psutil.Error:
                    continue
        try:
            used = self.stack.redis.info("memory")["used_memory"] / 2**20
            self.samples["redis: used_memory"].append(Sample(now, (0, 0.0), used))
        except redis.RedisError:
            pass

    def slopes(self, warm_up_seconds: float = WARM_UP_SECONDS) -> dict[str, Slope]:
        """Growth of every service; without those of which too little was seen."""
        found = {name: slope(samples, warm_up_seconds) for name, samples in sorted(self.samples.items())}
        return {name: value for name, value in found.items() if value is not None}


def slope(samples: list[Sample], warm_up_seconds: float = WARM_UP_SECONDS) -> Slope | None:
    """Growth over all lives: one slope, a level for each life. None when no life was long enough."""
    lives: dict[tuple[int, float], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.life].append(sample)
    rows, level_count = [], 0
    for life in lives.values():
        kept = [sample for sample in life if sample.time - life[0].time >= warm_up_seconds]
        if len(kept) < 3:
            continue
        level_count += 1
        mean_time = sum(sample.time for sample in kept) / len(kept)
        mean = sum(sample.megabytes for sample in kept) / len(kept)
        rows += [((sample.time - mean_time) / 3600, sample.megabytes - mean) for sample in kept]
    spread = sum(x * x for x, _ in rows)
    freedom = len(rows) - level_count - 1
    if not spread or freedom < 1:
        return None
    growth = sum(x * y for x, y in rows) / spread
    residual = sum((y - growth * x) ** 2 for x, y in rows)
    hours = len(rows) * SAMPLE_SECONDS / 3600
    return Slope(growth, math.sqrt(residual / freedom / spread), hours, samples[-1].megabytes)


def _module(process: psutil.Process) -> str:
    words = process.cmdline()
    return words[words.index("-m") + 1] if "-m" in words else process.name()
