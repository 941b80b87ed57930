"""The end of a lease on GPUs, as the processes that use them keep it.

The coordinator gives the GPUs of a replica that it hasn't heard of for a while to others, so nothing may be left on
them by then, whatever stands still. Two keep watch: the replica kills those of its child processes that use GPUs
(`GpuLease`), and each of them ends by itself (`end_with_lease`), in case the replica is stopped. Both look at one
number in memory that they share: the time at which the lease ends, by the monotonic clock, which all processes of a
machine share as well.

Nothing here knows of gRPC: child processes import it.
"""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Protocol

LEASE_VARIABLE = "RELAXD_GPU_LEASE_FD"
"""Environment variable that tells a child which descriptor the shared memory has."""
LOOK_SECONDS = 0.25
"""How often a child looks whether the lease was renewed."""
IDLE_SECONDS = 3600.0

_SIZE = ctypes.sizeof(ctypes.c_double)


class LeaseOver(Exception):
    """The GPUs may be another replica's by now."""


class Killable(Protocol):
    """A process that uses GPUs."""

    def kill(self) -> None:
        """End it and whatever it started, at once. Any thread may call it."""


class GpuLease:
    """One process's lease on GPUs: begun, renewed, given back, or over. Any thread may call it.

    A lease that is over is never renewed: its children have been killed, and another one has to be begun.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        """`on_over` is called, by a thread of its own, when a lease was not renewed in time and its children are
        killed."""
        self._on_over = on_over
        self._descriptor = -1
        self._shared = ctypes.c_double()
        """The end of the lease; in shared memory once there was one."""
        self._changed = threading.Condition()
        self._until: float | None = None
        """None: nothing is leased."""
        self._children: set[Killable] = set()
        self._watcher: threading.Thread | None = None

    @property
    def descriptor(self) -> int:
        """Of the shared memory, for a child to inherit. There is one once a lease was begun."""
        return self._descriptor

    def begin(self, until: float) -> None:
        """GPUs were leased until then. Raises LeaseOver when that is no time to come."""
        with self._changed:
            if time.monotonic() >= until:
                raise LeaseOver("the coordinator has not answered a heartbeat for as long as a lease on GPUs lasts")
            if self._watcher is None:
                self._descriptor = os.memfd_create("relaxd-gpu-lease")
                os.ftruncate(self._descriptor, _SIZE)
                self._shared = ctypes.c_double.from_buffer(mmap.mmap(self._descriptor, _SIZE))
                self._watcher = threading.Thread(target=self._watch, name="lease on GPUs", daemon=True)
                self._watcher.start()
            self._set(until)

    def renew(self, until: float) -> None:
        """The lease, if there is one that isn't over, ends then."""
        with self._changed:
            if self._until is not None and not self._ended():
                self._set(until)

    def give_back(self) -> None:
        """Nothing is leased any more, and no child uses GPUs."""
        with self._changed:
            self._set(None)

    def check(self) -> None:
        """Raise LeaseOver unless children may use GPUs now."""
        with self._changed:
            if self._until is None or self._ended():
                raise LeaseOver("the lease on this replica's GPUs is over")

    def add(self, child: Killable) -> None:
        """A child was started that uses GPUs. It is killed at once if the lease has ended meanwhile."""
        with self._changed:
            self._children.add(child)
            if self._until is None or self._ended():
                child.kill()

    def discard(self, child: Killable) -> None:
        """A child has ended."""
        with self._changed:
            self._children.discard(child)

    def _set(self, until: float | None) -> None:
        self._until = until
        self._shared.value = until or 0.0
        self._changed.notify()

    def _ended(self) -> bool:
        """Whether the lease is over; then its children are killed by now. Called with the lock."""
        if self._until is None or time.monotonic() < self._until:
            return False
        for child in self._children:
            child.kill()
        self._set(None)
        threading.Thread(target=self._on_over, name="the lease on GPUs is over", daemon=True).start()
        return True

    def _watch(self) -> None:
        with self._changed:
            while True:
                if self._until is None or self._ended():
                    self._changed.wait(IDLE_SECONDS)
                else:
                    self._changed.wait(max(0.0, self._until - time.monotonic()))


def end_with_lease() -> None:
    """In a child: end this process and what it started when the lease on its GPUs is over. Does nothing without one."""
    descriptor = int(os.environ.pop(LEASE_VARIABLE, "-1"))
    if descriptor < 0:
        return
    until = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _SIZE))
    os.close(descriptor)
    threading.Thread(target=_end_at, args=(until,), name="lease on GPUs", daemon=True).start()


def _end_at(until: ctypes.c_double) -> None:
    while (left := until.value - time.monotonic()) > 0:
        time.sleep(min(left, LOOK_SECONDS))
    # Not a word before it: whoever reads what this process writes may be stopped.
    os.killpg(0, signal.SIGKILL)
