"""Broadcasts between CPUs, through gloo: from the source to each member, or along a chain of members."""

import contextlib
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist


class GlooBroadcast:
    """A batch of broadcasts that started together."""

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
        """Wait until the broadcasts have ended, because CPUs have no streams."""
        self.finish()


def gloo_group(store: dist.Store, rank: int, world_size: int, address: str, timeout: float) -> Any:
    """Connect to the group's other members from this machine's address `address`. Raises RuntimeError.

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
        """Connect to the group's other members, as `gloo_group` does."""
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
        """Wait for the group's last operation, then close the group.

        Its destructor would wait while holding the GIL.
        """
        while True:
            with self._lock:
                if all(work.is_completed() for work in self._pending):
                    break
            time.sleep(0.05)  # brief: see the deadline
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()


PIECE_BYTES = 1 << 20
"""Maximum size of a message along the chain, in bytes."""
MAX_TAG = 1 << 31


class ChainBroadcast:
    """A batch of broadcasts along the chain."""

    def __init__(self, result: "Future[None]") -> None:
        self._result = result

    def done(self) -> bool:
        """Return True once this member has received and passed on all tensors, or has failed."""
        return self._result.done()

    def finish(self) -> None:
        """Raise RuntimeError if the transfer failed."""
        self._result.result()

    def precede_current_stream(self) -> None:
        """Wait until the batch has been transferred, because CPUs have no streams."""
        self.finish()


class GlooChain:
    """A gloo process group in which each rank passes tensors on to the next higher rank, and the last to rank 0."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, address: str, timeout: float) -> None:
        """Connect to the group's other members from this machine's address `address`. Raises RuntimeError."""
        self._group = gloo_group(store, rank, world_size, address, timeout)
        self._rank, self._size = rank, world_size
        self._lock = threading.Lock()
        self._tag = 0
        """Number of the last batch, the same in all members because they make the same calls."""
        self._batches: SimpleQueue[_Batch | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name=f"weight chain {rank}", daemon=True)
        self._worker.start()

    def start(self, tensors: Sequence[torch.Tensor], source_rank: int, timeout: float) -> ChainBroadcast:
        """Start sending or receiving tensors and passing them on to the next rank. Raises RuntimeError."""
        place = (self._rank - source_rank) % self._size
        before = (self._rank - 1) % self._size if place else None
        after = (self._rank + 1) % self._size if place < self._size - 1 else None
        pieces = [piece for tensor in tensors for piece in tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)]
        with self._lock:
            self._tag = (self._tag + 1) % MAX_TAG
            # Received even while an earlier batch is still passed on.
            receives = [] if before is None else [self._group.recv([piece], before, self._tag) for piece in pieces]
            batch = _Batch(pieces, receives, after, self._tag, time.monotonic() + timeout)
            self._batches.put(batch)
        return ChainBroadcast(batch.result)

    def abort(self) -> None:
        """Close the group once its last operation has ended: gloo can't cancel a receive before its deadline."""
        self._batches.put(None)
        self._worker.join()

    def _work(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._pass_on(batch)
            except RuntimeError as error:
                # Its frames hold the batch: with them the group and its sockets would stay open until a collection.
                batch.result.set_exception(error.with_traceback(None))
            else:
                batch.result.set_result(None)
        with contextlib.suppress(RuntimeError):
            self._group.shutdown()

    def _pass_on(self, batch: "_Batch") -> None:
        sends = []
        for number, piece in enumerate(batch.pieces):
            if batch.receives:
                batch.receives[number].wait(batch.left())  # brief: the batch's deadline
            if batch.after is not None:
                sends.append(self._group.send([piece], batch.after, batch.tag))
        for send in sends:
            send.wait(batch.left())  # brief: the batch's deadline


class _Batch:
    def __init__(
        self, pieces: list[torch.Tensor], receives: list[Any], after: int | None, tag: int, deadline: float
    ) -> None:
        self.pieces = pieces
        self.receives = receives
        self.after = after
        self.tag = tag
        self.result: Future[None] = Future()
        self._deadline = deadline

    def left(self) -> timedelta:
        """Return the time until the batch's deadline, at least a millisecond, because gloo takes 0 as no limit."""
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
