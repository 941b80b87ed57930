"""Sending the weights: which buckets there are, joining a weight group, one pipelined broadcast.

This runs in threads beside training, on process groups of its own. It may read the weights because `WeightsHold` keeps
the optimizer away meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from relaxd.weights.checksum import checksum
from relaxd.weights.group import Transfer, Transport, WeightGroup, WeightGroupError
from relaxd.weights.manifest import Bucket, TensorSpec, pack, plan_buckets
from services.trainer.learner import Learner

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Buffers: one travels while the next is filled."""


@dataclass(frozen=True)
class BroadcastResult:
    """What one rank sent."""

    seconds: float
    """From the call to the end of the last collective."""
    bytes: int
    """Bytes in this rank's own buckets."""
    checksums: dict[str, int] = field(default_factory=dict)
    """By tensor, of this rank's own buckets, where asked for."""


def weight_buckets(learner: Learner, bucket_bytes: int) -> list[Bucket]:
    """Everything that a broadcast sends, stage after stage; the source rank of a stage is the stage's number."""
    specs = learner.hf_tensor_specs()
    return [
        bucket
        for stage in range(learner.world.stages)
        for bucket in plan_buckets(
            [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in specs if spec.stage == stage],
            bucket_bytes,
            source_rank=stage,
        )
    ]


class Broadcaster:
    """This rank's part in weight groups and broadcasts."""

    def __init__(self, learner: Learner, buckets: list[Bucket]) -> None:
        self._learner = learner
        self._buckets = buckets
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        """One broadcast gathers at a time: one that failed may still be at it when the next one comes."""
        self._group: WeightGroup | None = None

    def join(self, transport: Transport, host: str, port: int, name: str, world_size: int, timeout: float) -> None:
        """Connect this source rank with the engines; an older group is left.

        Raises:
            WeightGroupError: not everybody came within `timeout` seconds, or `leave` was called meanwhile.
        """
        world = self._learner.world
        device = world.device if world.device.type == "cuda" else None
        group = WeightGroup(transport, host, port, name, world.stage, world_size, device)
        with self._lock:
            old, self._group = self._group, group
        if old is not None:
            old.abort()
        try:
            group.connect(timeout)
        except WeightGroupError:
            self.leave(name)
            raise

    def leave(self, name: str) -> None:
        """Abort and forget a group, also in the middle of a broadcast. Without effect if it isn't this rank's group."""
        with self._lock:
            group = self._group
            if group is None or group.name != name:
                return
            self._group = None
        group.abort()

    def broadcast(self, name: str, timeout: float, with_checksums: bool) -> BroadcastResult:
        """Take part in one broadcast. All ranks that hold a part of the weights call it at the same time.

        Raises:
            WeightGroupError: this rank isn't in the group; a member died or was late; the group was left meanwhile.
        """
        started = time.monotonic()
        with self._gathering:
            return self._broadcast(name, started, timeout, with_checksums)

    def _broadcast(self, name: str, started: float, timeout: float, with_checksums: bool) -> BroadcastResult:
        tensors = self._learner.iter_hf_tensors()
        try:
            if not self._learner.world.gather.source:
                return BroadcastResult(time.monotonic() - started, 0)
            with self._lock:
                group = self._group
            if group is None or group.name != name:
                raise WeightGroupError(f"this trainer is not in weight group {name}")
            try:
                return self._send(group, tensors, started, timeout, with_checksums)
            except BaseException:
                self.leave(name)
                raise
        finally:
            # Ranks that hold parts of the same tensors gather together: who stopped halfway would leave them waiting.
            for _ in tensors:
                pass

    def _send(
        self,
        group: WeightGroup,
        tensors: Iterator[tuple[str, torch.Tensor]],
        started: float,
        timeout: float,
        with_checksums: bool,
    ) -> BroadcastResult:
        world = self._learner.world
        largest = max(bucket.nbytes for bucket in self._buckets)
        # Made anew each time: what an aborted transfer still reads must not be written again.
        buffers = [torch.empty(largest, dtype=torch.uint8, device=world.device) for _ in range(IN_FLIGHT)]
        under_way: deque[Transfer] = deque()
        sent = 0
        checksums: dict[str, int] = {}
        for index, bucket in enumerate(self._buckets):
            if len(under_way) == IN_FLIGHT:
                under_way.popleft().wait()
            left = started + timeout - time.monotonic()
            if left <= 0:
                raise WeightGroupError(f"the broadcast in weight group {group.name} did not end within {timeout:g} s")
            buffer = buffers[index % IN_FLIGHT][: bucket.nbytes]
            if bucket.source_rank == world.stage:
                # A tensor lives until it is packed, so that no more than one bucket's tensors are ever gathered.
                gathered = dict(islice(tensors, len(bucket.tensors)))
                if with_checksums:
                    checksums |= {spec.name: checksum(gathered[spec.name].to(spec.dtype)) for spec in bucket.tensors}
                pack(bucket, gathered, buffer)
                sent += bucket.nbytes
            under_way.append(group.start_broadcast(buffer, bucket.source_rank, left))
        for transfer in under_way:
            transfer.wait()
        return BroadcastResult(time.monotonic() - started, sent, checksums)


def result_to_json(result: BroadcastResult) -> dict[str, Any]:
    """The result as the parent gets it."""
    return {"seconds": result.seconds, "bytes": result.bytes, "checksums": result.checksums}
