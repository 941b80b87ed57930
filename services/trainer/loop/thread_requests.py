"""Other threads' requests to rank 0's training thread, which serves them between two rounds of micro-batches."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from relaxd.rpc.errors import DeadlineExceeded, ResourceExhausted, Unavailable
from services.trainer.megatron.disk_work import DiskRefused

T = TypeVar("T")
Server = TypeVar("Server")
"""The training, on which an action works."""


class RequestQueue(Generic[Server]):
    """Actions for the training thread, in the order in which they were requested."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[Callable[[Server], Any], Future[Any]]] = queue.SimpleQueue()

    def ask(self, action: Callable[[Server], T], seconds: float) -> T:
        """Have the training thread run `action`, and return the result.

        Raises:
            DeadlineExceeded: it didn't end within `seconds`. If it hasn't begun by then, it never will.
            Unavailable: it failed.
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
    """Wait up to `seconds` for an answer of the training thread.

    Raises:
        DeadlineExceeded: it didn't come.
        ResourceExhausted: the disk refused what was to be written.
        Unavailable: it is another error.
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
    """Other threads' requests to the training thread."""

    def __init__(self) -> None:
        self.paused = threading.Event()
        self.draining = threading.Event()
        self.drained = threading.Event()
        self.sleep_requests: RequestQueue[Server] = RequestQueue()
        """Requests to sleep or wake up."""
        self.requests: RequestQueue[Server] = RequestQueue()
        """All other requests, which wait while the trainer sleeps."""
