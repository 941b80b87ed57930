"""Channels between ranks: training commands from rank 0 to all over gloo, and commands within a model-parallel group.

Rank 0 ticks at least every TICK_SECONDS while it waits for something, so other ranks can treat silence beyond the
collective's deadline as a dead or stuck rank 0. During disk I/O rank 0 can't tick: it announces the work first, and
the other ranks wait as `DiskWork` does.

Ranks with the same data-parallel rank (tensor, context and pipeline parallel) work on the same groups. One of them
reads a group and shares it, so that the source sends it only once.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from services.trainer.megatron import TICK_SECONDS
from services.trainer.megatron.disk_work import DiskWork
from services.trainer.megatron.rank_messages import MessageError, decode, encode, message, parse

TICK = None
"""Message that rank 0 sends instead of a command, to show that it is alive."""
PIECE_BYTES = 64 * 2**20
"""Maximum bytes of one broadcast, so that a value of gigabytes needs no second copy, and no piece takes long."""


@message
@dataclass(frozen=True)
class Failed:
    """Message that the reading rank sends instead of a value if reading failed."""

    error: str


def all_ranks_agree(yes: bool, *, device: torch.device | None = None, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `yes` is True on all ranks of a group, by default the world. Collective.

    `device`: the device on which the group communicates; by default the CPU.
    """
    votes = torch.tensor([int(yes)], device=device)
    if dist.get_world_size(group) > 1:
        dist.all_reduce(votes, dist.ReduceOp.MIN, group=group)
    return bool(votes)


def all_gather(value: Any) -> list[Any]:
    """Return the `value` of every rank of the world, in order of rank. Collective, over the world's process group.

    Raises MessageError for a value that can't be sent.
    """
    if (ranks := dist.get_world_size()) == 1:
        return [value]
    parts = encode(value)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.tensor([parts[0].nbytes, sum(part.nbytes for part in parts)], device=device)
    sizes = [torch.zeros_like(own) for _ in range(ranks)]
    dist.all_gather(sizes, own)
    room = max(int(size[1]) for size in sizes)
    sent = bytearray().join(parts).ljust(room, b"\0")
    found = [torch.zeros(room, dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(found, _tensor(memoryview(sent)).to(device))
    messages = (one.cpu().numpy().data for one in found)
    return [_split(one, *map(int, size)) for one, size in zip(messages, sizes, strict=True)]


def _split(data: memoryview, text: int, total: int) -> Any:
    """Decode the message in the first `total` bytes of `data`, whose first `text` bytes are its JSON."""
    node, sizes = parse(data[:text])
    if text + sum(sizes) != total:
        raise MessageError(f"a message of {total} bytes has {text + sum(sizes)}")
    ends = list(itertools.accumulate(sizes, initial=text))
    return decode(node, (data[begin:end] for begin, end in itertools.pairwise(ends)))


class RankChannel:
    """Channel by which rank 0 commands all other ranks. All ranks create it together; only training threads use it."""

    def __init__(self, timeout_seconds: float, disk: DiskWork) -> None:
        """Create the channel's process group. Receiving fails after `timeout_seconds` without a command or tick."""
        self.size = dist.get_world_size()
        self.disk = disk
        self.timeout_seconds = timeout_seconds
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._last = time.monotonic()

    def send(self, command: Any) -> None:
        """Rank 0: send a command, or TICK, to all other ranks. Raises MessageError if it can't be sent."""
        self._last = time.monotonic()
        if self.size > 1:
            _broadcast(encode(command), 0, self._group)

    def all_ranks_agree(self, yes: bool) -> bool:
        """Return True if `yes` is True on all ranks. Collective."""
        return all_ranks_agree(yes, group=self._group)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's `value` on rank 0, and [] on other ranks. Collective.

        Raises:
            MessageError: a value can't be sent.
        """
        if dist.get_rank() == 0:
            return [value, *(_receive(rank, self._group) for rank in range(1, self.size))]
        _send(encode(value), 0, self._group)
        return []

    def sum_over_ranks(self, value: int) -> int:
        """Return the sum of `value` over all ranks. Collective."""
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
            if (command := _take_broadcast(0, self._group)) is not TICK:
                return command


T = TypeVar("T")


class ModelParallelChannel:
    """Shares values among ranks with the same data-parallel rank: one rank reads a value, the others receive it.

    All ranks of the world create it together; only their training threads use it.
    """

    def __init__(self, dp_rank: int, timeout_seconds: float) -> None:
        """Create the process groups. Waiting for another rank fails after `timeout_seconds`."""
        dp_ranks = all_gather(dp_rank)
        members = {of: [rank for rank, its in enumerate(dp_ranks) if its == of] for of in sorted(set(dp_ranks))}
        self._source = members[dp_rank][0]
        self.reads = dist.get_rank() == self._source
        """True if this rank reads values and sends them to the others."""
        self._group: dist.ProcessGroup | None = None
        """Process group of the ranks with the same data-parallel rank; None if this rank is alone."""
        for of, ranks in members.items():
            if len(ranks) > 1:  # all have the same length, so that all ranks create the same groups
                group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
                self._group = group if of == dp_rank else self._group

    def share(self, read: Callable[[], T]) -> T:
        """Call `read` on the reading rank, and return its value on all ranks of the group. Collective.

        Arrays arrive read-only. If `read` raises, the other ranks raise a RuntimeError that says so.

        Raises:
            MessageError: the value can't be sent.
            RuntimeError: a rank is gone, or was silent for longer than the deadline.
        """
        if self._group is None:
            return read()
        if not self.reads:
            received = _take_broadcast(self._source, self._group)
            if isinstance(received, Failed):
                raise RuntimeError(received.error)
            return received
        try:
            value = read()
            parts = encode(value)
        except Exception as error:
            _broadcast(encode(Failed(f"{type(error).__name__}: {error}")), self._source, self._group)
            raise
        _broadcast(parts, self._source, self._group)
        return value


def _broadcast(parts: Sequence[memoryview], source: int, group: dist.ProcessGroup) -> None:
    """Broadcast a message from this rank, whose number is `source`, to the other ranks of a group."""
    dist.broadcast(torch.tensor([parts[0].nbytes]), source, group=group)
    dist.broadcast(_tensor(parts[0]), source, group=group)
    for piece, slices in _pieces(parts[1:]):
        at = 0
        for one in slices:
            piece[at : at + one.nbytes] = one
            at += one.nbytes
        dist.broadcast(_tensor(piece), source, group=group)


def _take_broadcast(source: int, group: dist.ProcessGroup) -> Any:
    """Return the next message that rank `source` broadcasts to the group."""
    dist.broadcast(size := torch.zeros(1, dtype=torch.int64), source, group=group)
    text = memoryview(bytearray(int(size)))
    dist.broadcast(_tensor(text), source, group=group)
    node, sizes = parse(text)
    arrays = [memoryview(bytearray(size)) for size in sizes]
    for piece, slices in _pieces(arrays):
        dist.broadcast(_tensor(piece), source, group=group)
        at = 0
        for one in slices:
            one[:] = piece[at : at + one.nbytes]
            at += one.nbytes
    return decode(node, arrays)


def _send(parts: Sequence[memoryview], to: int, group: dist.ProcessGroup) -> None:
    """Send a message to one rank, which receives it with `_receive`."""
    dist.send(torch.tensor([parts[0].nbytes]), to, group=group)
    for part in parts:
        if part.nbytes:
            dist.send(_tensor(memoryview(bytearray(part))), to, group=group)


def _receive(source: int, group: dist.ProcessGroup) -> Any:
    """Return the next message that a rank sends to this one with `_send`."""
    dist.recv(size := torch.zeros(1, dtype=torch.int64), source, group=group)
    dist.recv(_tensor(text := memoryview(bytearray(int(size)))), source, group=group)
    node, sizes = parse(text)
    arrays = [memoryview(bytearray(size)) for size in sizes]
    for array in arrays:
        if array.nbytes:
            dist.recv(_tensor(array), source, group=group)
    return decode(node, arrays)


def _tensor(part: memoryview) -> torch.Tensor:
    """Return a uint8 tensor that shares the memory of `part`, which must be writable and not empty."""
    return torch.frombuffer(part, dtype=torch.uint8)


def _pieces(parts: Sequence[memoryview]) -> Iterator[tuple[memoryview, list[memoryview]]]:
    """Cut the concatenated parts into pieces of at most PIECE_BYTES.

    For each piece, yield a buffer of the same size, which is reused, and the slices of the parts that make it up.
    """
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
