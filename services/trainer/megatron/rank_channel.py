"""The channel from rank 0 to the other ranks: training commands over gloo, and ticks while rank 0 waits.

Rank 0 ticks at least every TICK_SECONDS while it waits for something, so other ranks can treat silence beyond the
collective's deadline as a dead or stuck rank 0. During disk I/O rank 0 can't tick: it announces the work first, and
the other ranks wait as `DiskWork` does.
"""

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.megatron.disk_work import DiskWork
from services.trainer.megatron.tick import TICK_SECONDS

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
