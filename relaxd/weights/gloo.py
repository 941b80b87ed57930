"""Broadcasts between CPUs, through gloo."""

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class GlooBroadcast:
    """A batch of broadcasts started together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def done(self) -> bool:
        """Return True once the broadcasts have succeeded or failed."""
        return all(work.is_completed() for work in self._works)

    def finish(self) -> None:
        """Raise RuntimeError if a broadcast failed."""
        for work in self._works:
            work.wait()  # brief: the process group's timeout

    def precede_current_stream(self) -> None:
        """Wait: there are no streams."""
        self.finish()


def gloo_group(store: dist.Store, rank: int, world_size: int, address: str, timeout: float) -> Any:
    """Connect to the other members from `address` of this machine. Raises RuntimeError.

    Returns a dist.ProcessGroupGloo outside torch's registry.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 2
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return dist.ProcessGroupGloo(store, rank, world_size, options)


class GlooConnection:
    """A gloo process group whose members broadcast."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout: float) -> None:
        """Connect: see `gloo_group`."""
        self._group = gloo_group(store, rank, world_size, address, timeout)
        self._lock = threading.Lock()
        self._pending: list[Any] = []

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> GlooBroadcast:
        """Start one broadcast per tensor. Raises RuntimeError."""
        options = dist.BroadcastOptions()
        options.rootRank = source_rank
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout)
        with self._lock:
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
            self._pending = [*(work for work in self._pending if not work.is_completed()), *works]
        return GlooBroadcast(works)

    def abort(self) -> None:
        """Keep the group until its last operation ends, because its destructor would wait while holding the GIL."""
        while True:
            with self._lock:
                if all(work.is_completed() for work in self._pending):
                    break
            time.sleep(0.05)  # brief: see the deadline
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()
