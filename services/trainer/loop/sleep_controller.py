"""Sleep and wake-up of the trainer in a colocated run: its state moves to the host's memory and back."""

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from services.trainer.learner.learner import Learner
from services.trainer.learner.offload import memory_in_use
from services.trainer.loop.weight_read_lock import WeightReadLock
from services.trainer.megatron.rank_channel import TICK_SECONDS, RankChannel


@dataclass(frozen=True)
class MemoryChange:
    """Memory use before and after a sleep or wake-up, summed over ranks."""

    before: int
    """Bytes in use before."""
    after: int
    """Bytes in use after."""
    seconds: float
    """Duration."""


@dataclass(frozen=True)
class SleepRequest:
    """A request to the training thread to sleep or to wake up."""

    asleep: bool
    """Whether to sleep."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics to add to the next step's."""
    answer: "Future[MemoryChange]" = field(default_factory=Future)
    """Resolved when the change is done."""


class SleepController:
    """Rank 0's control of sleep and wake-up on all ranks. Used by the training thread only."""

    def __init__(
        self,
        learner: Learner,
        channel: RankChannel,
        weights: WeightReadLock,
        requests: "queue.SimpleQueue[SleepRequest]",
    ) -> None:
        self._learner = learner
        self._channel = channel
        self._weights = weights
        self._metrics: dict[str, float] = {}
        self.asleep = False
        self._asleep_since = time.monotonic()
        self._requests = requests

    def run_requests(self, on_wait: Callable[[], None]) -> None:
        """Run the pending requests; call `on_wait` regularly while waiting for a broadcast to end.

        While the trainer sleeps, `WeightReadLock` refuses broadcasts.
        """
        while not self._requests.empty():
            request = self._requests.get()
            try:
                request.answer.set_result(self._change(request, on_wait))
            except BaseException as error:  # for the requester; the training thread fails too
                request.answer.set_exception(error)
                raise

    def take_metrics(self) -> dict[str, float]:
        """Return and reset the metrics since the last step: seconds spent on sleeps and wake-ups, and memory freed."""
        metrics, self._metrics = self._metrics, {}
        if metrics:
            metrics["switch_seconds"] = sum(
                value for name, value in metrics.items() if name.startswith("switch_") and name.endswith("_seconds")
            )
        return metrics

    def _change(self, request: SleepRequest, on_wait: Callable[[], None]) -> MemoryChange:
        for name, value in request.metrics.items():
            if name.endswith("_seconds"):  # there may be several sleeps before a step
                self._add(name, value)
            else:
                self._metrics[name] = value
        started = time.monotonic()
        if request.asleep == self.asleep:
            now = memory_in_use(self._learner.world.device)
            return MemoryChange(now, now, 0.0)
        if request.asleep:
            with self._weights.changing(on_wait, TICK_SECONDS):
                change = self._move("offload")
        else:
            change = self._move("onload")
            self._weights.publish(self._learner.step)
        self.asleep = request.asleep
        seconds = time.monotonic() - started
        if request.asleep:
            self._asleep_since = started
        else:
            self._add("switch_trainer_onload_seconds", seconds)
            self._add("asleep_seconds", started + seconds - self._asleep_since)
        return MemoryChange(*change, seconds)

    def _add(self, name: str, seconds: float) -> None:
        self._metrics[name] = self._metrics.get(name, 0.0) + seconds

    def _move(self, direction: str) -> tuple[int, int]:
        """Offload or onload on all ranks. Return the bytes in use before and after."""
        self._channel.send({"do": direction})
        before, after = self._learner.offload() if direction == "offload" else self._learner.onload()
        return self._channel.sum_over_ranks(before), self._channel.sum_over_ranks(after)
