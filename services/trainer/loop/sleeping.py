"""Rank 0's part in a colocated run's turns: the world sleeps, its state in the host's memory, and wakes up again."""

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
    """What a change did to the memory, over all ranks."""

    before: int
    """Bytes in use before."""
    after: int
    """Bytes in use after."""
    seconds: float
    """How long it took."""


@dataclass(frozen=True)
class TurnRequest:
    """Asks the training thread to sleep or to wake up."""

    asleep: bool
    """What is wanted."""
    metrics: dict[str, float] = field(default_factory=dict)
    """To be entered into the next step's metrics."""
    answer: "Future[MemoryChange]" = field(default_factory=Future)
    """When it is done."""


class Sleeping:
    """Whether the world sleeps. Used by the training thread."""

    def __init__(
        self,
        learner: Learner,
        channel: RankChannel,
        weights: WeightReadLock,
        requests: "queue.SimpleQueue[TurnRequest]",
    ) -> None:
        self._learner = learner
        self._channel = channel
        self._weights = weights
        self._metrics: dict[str, float] = {}
        self.asleep = False
        self._asleep_since = time.monotonic()
        self._requests = requests

    def follow(self, waiting: Callable[[], None]) -> None:
        """Do what was asked, between two rounds. `waiting` is called now and then while a broadcast is waited for.

        Weights that are away can't be sent: `WeightReadLock` says so.
        """
        while not self._requests.empty():
            request = self._requests.get()
            try:
                request.answer.set_result(self._change(request, waiting))
            except BaseException as error:  # whoever asked hears of it, and so does the training thread
                request.answer.set_exception(error)
                raise

    def take_metrics(self) -> dict[str, float]:
        """What changing turns took since the last step, in seconds, and the memory that it freed, by name."""
        metrics, self._metrics = self._metrics, {}
        if metrics:
            metrics["switch_seconds"] = sum(
                value for name, value in metrics.items() if name.startswith("switch_") and name.endswith("_seconds")
            )
        return metrics

    def _change(self, request: TurnRequest, waiting: Callable[[], None]) -> MemoryChange:
        for name, value in request.metrics.items():
            if name.endswith("_seconds"):  # there may be several changes of turns before a step
                self._add(name, value)
            else:
                self._metrics[name] = value
        started = time.monotonic()
        if request.asleep == self.asleep:
            now = memory_in_use(self._learner.world.device)
            return MemoryChange(now, now, 0.0)
        if request.asleep:
            with self._weights.changing(waiting, TICK_SECONDS):
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

    def _move(self, what: str) -> tuple[int, int]:
        """On all ranks."""
        self._channel.send({"do": what})
        before, after = self._learner.offload() if what == "offload" else self._learner.onload()
        return self._channel.add_up(before), self._channel.add_up(after)
