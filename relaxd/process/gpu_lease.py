"""Lease on a replica's GPUs: the replica and its child processes enforce its end.

When a replica's heartbeats stop, the coordinator leases its GPUs to other replicas. By then none of the replica's
processes may use these GPUs, even if some hang. The replica kills its child processes that use GPUs (`GpuLease`), and
each child also ends by itself (`end_with_lease`), in case the replica is suspended. Replica and children share one
number in memory: the end of the lease by the monotonic clock, which is the same for all processes of a machine.

Imports nothing of gRPC, because child processes import this module.
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
"""Environment variable with the file descriptor of the shared memory that holds the end of the lease."""
POLL_SECONDS = 0.25
"""Seconds between two checks, in a child process, whether the lease on its GPUs has ended."""
IDLE_SECONDS = 3600.0

_SIZE = ctypes.sizeof(ctypes.c_double)


class LeaseOver(Exception):
    """The lease on GPUs has ended; another replica may use these GPUs now."""


class Killable(Protocol):
    """A process that uses leased GPUs, and can be killed."""

    def kill(self) -> None:
        """Kill the process and every process that it started. Any thread may call this."""


class GpuLease:
    """One replica's lease on GPUs. Any thread may call its methods.

    A lease that has ended can't be renewed: its children were killed, and `begin` starts a new lease.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        """Create a lease that hasn't begun. After a lease expired and its children were killed, `on_over` is called in
        a separate thread."""
        self._on_over = on_over
        self._descriptor = -1
        self._shared = ctypes.c_double()
        """End of the lease by the monotonic clock, in seconds; 0 if no lease is in force. In shared memory from the
        first lease on."""
        self._changed = threading.Condition()
        self._until: float | None = None
        """End of the lease by the monotonic clock, in seconds; None if no lease is in force."""
        self._children: set[Killable] = set()
        self._watcher: threading.Thread | None = None

    @property
    def descriptor(self) -> int:
        """File descriptor, which children inherit, of the shared memory with the lease's end; -1 before the first
        lease."""
        return self._descriptor

    def begin(self, until: float) -> None:
        """Begin a lease that ends at `until` (monotonic). Raises LeaseOver if that time has passed."""
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
        """Move the end of the lease to `until`. Does nothing if no lease is in force."""
        with self._changed:
            if self._until is not None and not self._end_if_over():
                self._set(until)

    def give_back(self) -> None:
        """End the lease. Call it when no child uses GPUs any more."""
        with self._changed:
            self._set(None)

    def check(self) -> None:
        """Raise LeaseOver unless a lease is in force."""
        with self._changed:
            if self._until is None or self._end_if_over():
                raise LeaseOver("the lease on this replica's GPUs is over")

    def add(self, child: Killable) -> None:
        """Register `child` to be killed when the lease ends. If no lease is in force, kill `child` at once."""
        with self._changed:
            self._children.add(child)
            if self._until is None or self._end_if_over():
                child.kill()

    def discard(self, child: Killable) -> None:
        """Unregister a child that has ended, so that it isn't killed."""
        with self._changed:
            self._children.discard(child)

    def _set(self, until: float | None) -> None:
        self._until = until
        self._shared.value = until or 0.0
        self._changed.notify()

    def _end_if_over(self) -> bool:
        """If the lease has ended, kill all registered children and return True. The caller holds the lock."""
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
                if self._until is None or self._end_if_over():
                    self._changed.wait(IDLE_SECONDS)  # idle: no lease
                else:
                    self._changed.wait(max(0.0, self._until - time.monotonic()))  # idle: the lease holds


def end_with_lease() -> None:
    """Kill this child process and its own children when the lease on its GPUs ends, if there is a lease."""
    descriptor = int(os.environ.pop(LEASE_VARIABLE, "-1"))
    if descriptor < 0:
        return
    until = ctypes.c_double.from_buffer(mmap.mmap(descriptor, _SIZE))
    os.close(descriptor)
    threading.Thread(target=_kill_group_at, args=(until,), name="lease on GPUs", daemon=True).start()


def _kill_group_at(until: ctypes.c_double) -> None:
    while (left := until.value - time.monotonic()) > 0:
        time.sleep(min(left, POLL_SECONDS))  # brief: the end of the lease
    # Without logging: a write would block if the reader of this process's output is stopped.
    os.killpg(0, signal.SIGKILL)
