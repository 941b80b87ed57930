"""Broadcasts through gloo: between CPUs."""

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class GlooBroadcast:
    """Broadcasts that were started together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def done(self) -> bool:
        """Whether they have ended, well or not."""
        return all(work.is_completed() for work in self._works)

    def finish(self) -> None:
        """Raise RuntimeError unless all ended well."""
        for work in self._works:
            work.wait()

    def precede_current_stream(self) -> None:
        """There is no stream."""
        self.finish()


class GlooConnection:
    """A gloo process group that nobody else knows of."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout: float) -> None:
        """Connect with the other members, from an address of this machine. Raises RuntimeError."""
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._threads = 2
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
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
        """Hold the group until its last operation is over: its destructor would wait with the interpreter locked."""
        while True:
            with self._lock:
                if all(work.is_completed() for work in self._pending):
                    break
            time.sleep(0.05)
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()
