"""Channels between ranks: training commands from rank 0 to all over gloo, and commands within a model-parallel group.

Rank 0 ticks at least every TICK_SECONDS while it waits for something, so other ranks can treat silence beyond the
collective's deadline as a dead or stuck rank 0. During disk I/O rank 0 can't tick: it announces the work first, and
the other ranks wait as `DiskWork` does.

The ranks of a data-parallel index (tensor, context and pipeline parallel) work on the same groups. If each of them
read a group, the source would send it as often as there are ranks.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.disk_work import DiskWork

TICK = None
"""Sent instead of a command."""


def all_ranks_agree(yes: bool, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether `yes` is True on all ranks of a group, by default the world. All call it together.

    `device`: where the group communicates; by default the CPU.
    """
    votes = torch.tensor([int(yes)], device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes)


class RankChannel:
    """The control channel of the world. All ranks create it together; only their training threads use it."""

    def __init__(self, timeout_seconds: float, disk: DiskWork) -> None:
        """Create the channel's process group. Receiving fails after `timeout_seconds` without a command or tick."""
        self.size = dist.get_world_size()
        self.disk = disk
        self.timeout_seconds = timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._last = time.monotonic()

    def send(self, command: Any) -> None:
        """Rank 0: send a command, which can be pickled, to all other ranks."""
        self._last = time.monotonic()
        if self.size > 1:
            dist.broadcast_object_list([command], 0, group=self._group)

    def all_ranks_agree(self, yes: bool) -> bool:
        """Return whether `yes` is True on all ranks. All call it together."""
        return all_ranks_agree(yes, group=self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which can be pickled, on rank 0; nothing elsewhere. All call it together."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if dist.get_rank() == 0 else None
        dist.gather_object(value, values, group=self._group)
        return values or []

    def sum_over_ranks(self, value: int) -> int:
        """Return the sum of all ranks' values. All call it together."""
        values = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(values, group=self._group)
        return int(values)

    def tick(self) -> None:
        """Rank 0: send a tick if nothing was sent for TICK_SECONDS."""
        if time.monotonic() - self._last >= TICK_SECONDS:
            self.send(TICK)

    def receive(self) -> Any:
        """Other ranks: return the next command, skipping ticks.

        Raises:
            RuntimeError: rank 0 is gone, or was silent for longer than the deadline.
        """
        while True:
            received = [TICK]
            dist.broadcast_object_list(received, 0, group=self._group)
            if received[0] is not TICK:
                return received[0]


T = TypeVar("T")

PIECE_BYTES = 64 * 2**20
"""Maximum bytes of one broadcast. A value of gigabytes needs no second copy of itself, and no piece takes long."""


class ModelParallelChannel:
    """All ranks of the world create it together; only their training threads use it."""

    def __init__(self, dp_rank: int, timeout_seconds: float) -> None:
        """Join the ranks with the same data-parallel rank. Waiting for another rank fails after `timeout_seconds`."""
        dp_ranks = [dp_rank] * dist.get_world_size()
        if len(dp_ranks) > 1:
            dist.all_gather_object(dp_ranks, dp_rank)
        members = {of: [rank for rank, its in enumerate(dp_ranks) if its == of] for of in sorted(set(dp_ranks))}
        self._source = members[dp_rank][0]
        self.reads = dist.get_rank() == self._source
        """True on the rank that reads."""
        self._group: dist.ProcessGroup | None = None
        """None if this rank is alone."""
        for of, ranks in members.items():
            if len(ranks) > 1:  # as many in each: all ranks create the same groups
                group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
                self._group = group if of == dp_rank else self._group

    def share(self, read: Callable[[], T]) -> T:
        """Return on all ranks of the group the value of `read` on the reading rank. Collective.

        The value must be one that pickle can copy. Arrays arrive read-only. If `read` raises, all ranks raise its
        error; one that can't be pickled becomes a RuntimeError.

        Raises:
            RuntimeError: a rank is gone, or was silent for longer than the deadline.
        """
        if self._group is None:
            return read()
        if not self.reads:
            return self._receive(self._group)
        try:
            value = read()
            arrays: list[pickle.PickleBuffer] = []
            parts = [memoryview(pickle.dumps(value, protocol=5, buffer_callback=arrays.append))]
            parts += [array.raw() for array in arrays]
        except Exception as error:
            dist.broadcast_object_list([_sendable(error)], self._source, group=self._group)
            raise
        dist.broadcast_object_list([[part.nbytes for part in parts]], self._source, group=self._group)
        for piece, slices in _pieces(parts):
            at = 0
            for one in slices:
                piece[at : at + one.nbytes] = one
                at += one.nbytes
            self._broadcast(piece)
        return value

    def _receive(self, group: dist.ProcessGroup) -> Any:
        announced: list[Any] = [None]
        dist.broadcast_object_list(announced, self._source, group=group)
        if isinstance(announced[0], Exception):
            raise announced[0]
        parts = [memoryview(bytearray(size)) for size in announced[0]]
        for piece, slices in _pieces(parts):
            self._broadcast(piece)
            at = 0
            for one in slices:
                one[:] = piece[at : at + one.nbytes]
                at += one.nbytes
        return pickle.loads(parts[0], buffers=[part.toreadonly() for part in parts[1:]])

    def _broadcast(self, piece: memoryview) -> None:
        if piece.nbytes:
            dist.broadcast(torch.frombuffer(piece, dtype=torch.uint8), self._source, group=self._group)


def _pieces(parts: Sequence[memoryview]) -> Iterator[tuple[memoryview, list[memoryview]]]:
    """Cut parts, one after the other, into pieces. Yield room for each, the same every time, and what belongs there."""
    room = memoryview(bytearray(min(PIECE_BYTES, sum(part.nbytes for part in parts))))
    slices: list[memoryview] = []
    free = room.nbytes
    for part in parts:
        at = 0
        while at < part.nbytes:
            slices.append(part[at : at + free])
            at += slices[-1].nbytes
            free -= slices[-1].nbytes
            if not free:
                yield room, slices
                slices, free = [], room.nbytes
    if slices:
        yield room[: room.nbytes - free], slices


def _sendable(error: Exception) -> Exception:
    """Return the error, or what says the same if it can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
