"""How rank 0 tells the other ranks what to do: commands in JSON over gloo, and ticks while there is nothing to do.

Nobody waits in a collective for longer than its deadline: rank 0 ticks at least every TICK_SECONDS, whatever it waits
for, so that a rank that hears nothing knows that rank 0 is gone or stuck. While rank 0 is at work on a disk it can't
tick: it says so before, and the others wait for it as `DiskWork` does.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from services.trainer.megatron.disk_work import DiskWork, Progress

TICK_SECONDS = 0.5
"""Longest silence of a rank 0 that only waits."""

TICK = {"do": "tick"}


class RankChannel:
    """The control channel of the world. Made by all ranks at the same time, used by each rank's training thread."""

    def __init__(self, timeout_seconds: float, disk: DiskWork) -> None:
        """Make the channel's group; a command that takes longer than `timeout_seconds` to come fails."""
        self.size = dist.get_world_size()
        self.disk = disk
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._last = time.monotonic()

    def send(self, command: dict[str, Any]) -> None:
        """Rank 0: tell all others. It goes on when they have it."""
        self._last = time.monotonic()
        if self.size == 1:
            return
        payload = torch.frombuffer(bytearray(json.dumps(command).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([payload.numel()]), 0, group=self._group)
        dist.broadcast(payload, 0, group=self._group)

    @contextmanager
    def alone(self, what: str) -> Iterator[Progress]:
        """Rank 0: do some work on disks in the block while the others wait; see `DiskWork.together`."""
        self.send({"do": "wait", "what": what})
        with self.disk.together(what) as progress:
            yield progress

    def agree(self, yes: bool) -> bool:
        """Whether all ranks say yes. All call it together."""
        votes = torch.tensor([int(yes)])
        if self.size > 1:
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
        return bool(votes)

    def add_up(self, value: int) -> int:
        """The sum of every rank's value. All call it together."""
        values = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(values, group=self._group)
        return int(values)

    def tick(self) -> None:
        """Rank 0: show the others that it lives, if it hasn't for a while."""
        if time.monotonic() - self._last >= TICK_SECONDS:
            self.send(TICK)

    def receive(self) -> dict[str, Any]:
        """Another rank: the next command that isn't a tick.

        Raises:
            RuntimeError: rank 0 is gone, or silent for longer than the deadline.
        """
        while True:
            length = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(length, 0, group=self._group)
            payload = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(payload, 0, group=self._group)
            command = json.loads(payload.numpy().tobytes())
            if command != TICK:
                return command
