"""Helpers of long-lived processes: signals that stop them, a pool of idle threads, garbage collection."""

import asyncio
import gc
import logging
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)


def stop_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets. A second signal ends the process at once, with exit code
    1.

    Call this function in the main thread, inside the event loop.
    """
    requested = asyncio.Event()

    def on_signal(name: str) -> None:
        if requested.is_set():
            _log.warning("%s again: exiting now", name)
            os._exit(1)
        _log.info("%s: shutting down (again to exit now)", name)
        requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return requested


def freeze_objects() -> None:
    """Collect garbage once more, then exempt all existing objects from further collections.

    Call this function once imports, configuration, prompts and models are loaded: a full collection with these objects
    takes 0.1 to 0.25 s, which delays heartbeats and steps. Each call also collects garbage among objects exempted
    earlier.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


IDLE_THREADS = 8
"""Maximum number of idle threads in a pool. Threads beyond it end after their call."""


class IdleThreads:
    """A pool of threads, each of which runs one call at a time.

    An idle thread takes the next call. If no thread is idle, a new one is started, so no call waits for another.
    """

    def __init__(self) -> None:
        self._idle: deque[queue.SimpleQueue[_Work]] = deque()
        """Queues of the idle threads, one per thread. A thread takes its next call from its queue."""
        self._lock = threading.Lock()

    def run(self, name: str, do: Callable[[], Any]) -> "Future[Any]":
        """Run `do` in a thread of the pool, which has the name `name` meanwhile. Returns the future of the result."""
        answer: Future[Any] = Future()
        answer.set_running_or_notify_cancel()  # a caller that stops waiting doesn't cancel it
        work = _Work(name, do, answer)
        try:
            self._idle.pop().put(work)  # the last one that became idle
        except IndexError:
            threading.Thread(target=self._work, args=(work,), name=name, daemon=True).start()
        return answer

    def _work(self, work: "_Work") -> None:
        calls: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        while self._settle(work, calls):
            del work  # an idle thread holds on to no request
            threading.current_thread().name = "idle"
            work = calls.get()
            threading.current_thread().name = work.name

    def _settle(self, work: "_Work", calls: "queue.SimpleQueue[_Work]") -> bool:
        """Run a call and set its result. Returns True if the thread then waits for its next call in the queue
        `calls`."""
        try:
            result = work.do()
        except BaseException as error:
            idle = self._idles(calls)
            work.answer.set_exception(error)
        else:
            idle = self._idles(calls)  # before the result is set: then the caller may call again
            work.answer.set_result(result)
        return idle

    def _idles(self, calls: "queue.SimpleQueue[_Work]") -> bool:
        with self._lock:
            if len(self._idle) >= IDLE_THREADS:
                return False
            self._idle.append(calls)
            return True


@dataclass(frozen=True)
class _Work:
    """A call that a thread of the pool runs."""

    name: str
    do: Callable[[], Any]
    answer: "Future[Any]"
