"""Other threads' requests to rank 0's training thread, which serves them between two rounds of micro-batches. In a
colocated run, some requests are for sleep and wake-up: the trainer's state moves to the host's memory and back."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from relaxd.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from relaxd.v1.weights_pb2 import MemoryChange
from services.trainer.learner.offload import memory_in_use
from services.trainer.loop.training_commands import TrainingRank, offload_state
from services.trainer.loop.weight_read_lock import WeightReadLock
from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.disk_work import DiskRefused

T = TypeVar("T")
Server = TypeVar("Server")
"""Type of the object that the training thread passes to each action."""


class RequestQueue(Generic[Server]):
    """First-in, first-out queue of actions that other threads ask the training thread to run."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[Server], Any], Future[Any]]] = queue.SimpleQueue()

    def ask(self, action: Callable[[Server], T], seconds: float) -> T:
        """Have the training thread run `action`, and return the result.

        Raises:
            DeadlineExceeded: the action didn't end within `seconds`. If it hasn't begun by then, it never will.
            Unavailable: the action failed.
        """
        answer: Future[T] = Future()
        self._requests.put((action, answer))
        try:
            return result_of(answer, seconds)
        finally:
            answer.cancel()

    def run(self, server: Server) -> None:
        """Run the pending actions. Called by the training thread.

        Raises:
            Exception: an action failed. The requester gets the error too.
        """
        while True:
            try:
                action, answer = self._requests.get_nowait()
            except queue.Empty:
                return
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(action(server))
            except BaseException as error:
                answer.set_exception(error)
                raise  # the other ranks fail as well


def result_of(answer: "Future[T]", seconds: float) -> T:
    """Wait up to `seconds` until the training thread has run an action. Return the action's result.

    Raises:
        DeadlineExceeded: no answer came in time.
        ResourceExhausted: the disk refused a write.
        Unavailable: the action failed with another error.
    """
    wait([answer], seconds)
    if not answer.done():
        raise DeadlineExceeded(f"the training thread did not answer within {seconds:g} s")
    try:
        return answer.result(0.0)
    except DiskRefused as error:
        raise ResourceExhausted(str(error)) from error
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {error}") from error


class Controls(Generic[Server]):
    """Requests of other threads to the training thread: pause, drain, sleep, or run an action."""

    def __init__(self) -> None:
        self.paused = threading.Event()
        self.draining = threading.Event()
        self.drained = threading.Event()
        self.sleep_requests: RequestQueue[Server] = RequestQueue()
        """Requests to sleep or wake up."""
        self.requests: RequestQueue[Server] = RequestQueue()
        """All other requests, which wait while the trainer sleeps."""


class SleepController:
    """Moves the training state of all ranks between devices and host. Used by rank 0's training thread only."""

    def __init__(self, rank: TrainingRank, weights: WeightReadLock) -> None:
        self._rank = rank
        self._weights = weights
        self._metrics: dict[str, float] = {}
        self.asleep = False
        self._asleep_since = 0.0

    def sleep(self) -> MemoryChange:
        """Move the training state to the host's memory, once no broadcast reads it. Refuse later broadcasts."""
        if self.asleep:
            return self._no_change()
        started = time.monotonic()
        self._weights.begin_change("it is going to sleep", self._rank.channel.tick, TICK_SECONDS)
        before, after = self._rank.run(offload_state, to_host=True)
        self.asleep, self._asleep_since = True, started
        return MemoryChange(before_bytes=before, after_bytes=after, seconds=time.monotonic() - started)

    def wake(self, metrics: Mapping[str, float]) -> MemoryChange:
        """Move the training state back to the devices. Add `metrics` to the next step's metrics."""
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
        """Return and reset the metrics of sleeps and wake-ups since the last step: seconds and freed memory."""
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
