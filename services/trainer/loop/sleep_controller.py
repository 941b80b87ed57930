"""Sleep and wake-up of the trainer in a colocated run: its state moves to the host's memory and back."""

import time
from collections.abc import Mapping

from relaxd.v1.weights_pb2 import MemoryChange
from services.trainer.learner.offload import memory_in_use
from services.trainer.loop.training_commands import TrainingRank, offload_state
from services.trainer.loop.weight_read_lock import WeightReadLock
from services.trainer.megatron import TICK_SECONDS


class SleepController:
    """Rank 0's control of sleep and wake-up on all ranks. Used by the training thread only."""

    def __init__(self, rank: TrainingRank, weights: WeightReadLock) -> None:
        self._rank = rank
        self._weights = weights
        self._metrics: dict[str, float] = {}
        self.asleep = False
        self._asleep_since = 0.0

    def sleep(self) -> MemoryChange:
        """Move the state to the host's memory once no broadcast reads it. Later broadcasts are refused."""
        if self.asleep:
            return self._no_change()
        started = time.monotonic()
        self._weights.begin_change("it is going to sleep", self._rank.channel.tick, TICK_SECONDS)
        before, after = self._rank.run(offload_state, to_host=True)
        self.asleep, self._asleep_since = True, started
        return MemoryChange(before_bytes=before, after_bytes=after, seconds=time.monotonic() - started)

    def wake(self, metrics: Mapping[str, float]) -> MemoryChange:
        """Move the state back to the devices and add `metrics` to the next step's."""
        for name, value in metrics.items():
            if name.endswith("_seconds"):  # there may be several sleeps before a step
                self._add(name, value)
            else:
                self._metrics[name] = value
        if not self.asleep:
            return self._no_change()
        started = time.monotonic()
        before, after = self._rank.run(offload_state, to_host=False)
        self._weights.publish(self._rank.learner.step)
        self.asleep = False
        ended = time.monotonic()
        self._add("switch_trainer_onload_seconds", ended - started)
        self._add("asleep_seconds", ended - self._asleep_since)
        return MemoryChange(before_bytes=before, after_bytes=after, seconds=ended - started)

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics since the last step: seconds of sleeps and wake-ups, and freed memory."""
        metrics, self._metrics = self._metrics, {}
        if metrics:
            metrics["switch_seconds"] = sum(
                value for name, value in metrics.items() if name.startswith("switch_") and name.endswith("_seconds")
            )
        return metrics

    def _no_change(self) -> MemoryChange:
        now = memory_in_use(self._rank.learner.world.device)
        return MemoryChange(before_bytes=now, after_bytes=now)

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds
