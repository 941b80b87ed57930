"""Sending the weights: which buckets there are, joining a weight group, one pipelined broadcast.

This runs in threads beside training, on process groups of its own. `WeightReadLock` keeps the optimizer away from the
weights meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from relaxd.weights.checksum import checksums
from relaxd.weights.group import Transfer, Transport, WeightGroup, WeightGroupError
from relaxd.weights.layout import Layout, as_sent, broadcast_layout, piece_bytes, pieces
from relaxd.weights.manifest import Bucket, TensorSpec, pack, plan_buckets
from relaxd.weights.stock_group import StockWeightGroup
from services.trainer.learner.learner import Learner

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Buckets under way: one travels while the next is filled."""
_POLL_SECONDS = 0.0005


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
    """This rank's part in weight groups and broadcasts.

    On a GPU all is enqueued on a stream beside training: while a bucket travels the next one is gathered, and the host
    only waits for the end. Tensors that Megatron keeps as checkpoints do are sent from where they are.
    """

    def __init__(self, learner: Learner, buckets: list[Bucket], engine: str) -> None:
        """`engine` is the kind of engine that receives (rollout.engine)."""
        self._learner = learner
        self._buckets = buckets
        self._engine = engine
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        """One broadcast gathers at a time: one that failed may still be at it when the next one comes."""
        self._membership: _Membership | None = None
        device = learner.world.device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def join(self, transport: Transport, host: str, port: int, name: str, world_size: int, timeout: float) -> None:
        """Connect this source rank with the engines; an older group is left.

        Raises:
            WeightGroupError: not everybody came within `timeout` seconds, or `leave` was called meanwhile.
        """
        world = self._learner.world
        device = None if transport == "gloo" else world.device
        kind = StockWeightGroup if self._engine == "sglang_external" else WeightGroup
        group = kind(transport, host, port, name, world.stage, world_size, device)
        layout = broadcast_layout(transport, self._engine)
        membership = _Membership(group, layout, self._make_buffers(layout, device or torch.device("cpu")))
        with self._lock:
            old, self._membership = self._membership, membership
        if old is not None:
            old.group.abort()
        try:
            group.connect(timeout)
        except WeightGroupError:
            self.leave(name)
            raise

    def leave(self, name: str) -> None:
        """Abort and forget a group, also in the middle of a broadcast. Without effect if it isn't this rank's group."""
        with self._lock:
            membership = self._membership
            if membership is None or membership.group.name != name:
                return
            self._membership = None
        membership.group.abort()

    def broadcast(self, name: str, timeout: float, with_checksums: bool) -> BroadcastResult:
        """Take part in one broadcast. All ranks that hold a part of the weights call it at the same time.

        Raises:
            WeightGroupError: this rank isn't in the group; a member died or was late; the group was left meanwhile.
        """
        started = time.monotonic()
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._gathering, torch.no_grad(), stream:
            return self._broadcast(name, started, timeout, with_checksums)

    def _broadcast(self, name: str, started: float, timeout: float, with_checksums: bool) -> BroadcastResult:
        tensors = self._learner.iter_hf_tensors()
        source = self._learner.world.gather.source
        try:
            if source:
                with self._lock:
                    membership = self._membership
                if membership is None or membership.group.name != name:
                    raise WeightGroupError(f"this trainer is not in weight group {name}")
                try:
                    return self._send(membership, tensors, started + timeout, started, with_checksums)
                except BaseException:
                    self.leave(name)
                    raise
        finally:
            # Ranks that hold parts of the same tensors gather together: who stopped halfway would leave them waiting.
            for _ in tensors:
                pass
        self._wait_until_gathered(started + timeout)
        return BroadcastResult(time.monotonic() - started, 0)

    def _send(
        self,
        membership: "_Membership",
        tensors: Iterator[tuple[str, torch.Tensor]],
        deadline: float,
        started: float,
        with_checksums: bool,
    ) -> BroadcastResult:
        group, stage = membership.group, self._learner.world.stage
        transfers: list[Transfer] = []
        kept: deque[list[torch.Tensor]] = deque()
        """What is being sent lives until it is: at most IN_FLIGHT buckets of gathered tensors."""
        sent = 0
        found: dict[str, int] = {}
        for index, bucket in enumerate(self._buckets):
            if len(kept) == IN_FLIGHT:
                transfers[index - IN_FLIGHT].precede_current_stream()
                kept.popleft()
            buffer = membership.buffers[index % IN_FLIGHT]
            gathered = None
            if bucket.source_rank == stage:
                gathered = dict(islice(tensors, len(bucket.tensors)))
                if with_checksums:
                    found |= checksums({s.name: gathered[s.name].to(s.dtype) for s in bucket.tensors})
                sent += bucket.nbytes
            if membership.layout == "flat":
                wire = [buffer[: bucket.nbytes] if gathered is None else pack(bucket, gathered, buffer)]
            else:
                wire = pieces(bucket, buffer) if gathered is None else as_sent(bucket, gathered)
            left = deadline - time.monotonic()
            if left <= 0:
                raise WeightGroupError(f"the broadcast in weight group {group.name} did not end in time")
            transfers.append(group.start_broadcasts(wire, bucket.source_rank, left))
            kept.append(wire)
        for transfer in transfers:
            transfer.wait()
        return BroadcastResult(time.monotonic() - started, sent, found)

    def _make_buffers(self, layout: Layout, device: torch.device) -> list[torch.Tensor]:
        """Buffers for buckets: all in the flat layout, else those of other stages, which this rank has no use for.

        They are given up with their group: what an aborted transfer still reads must not be written again.
        """
        stage = self._learner.world.stage
        if layout == "flat":
            size = max(bucket.nbytes for bucket in self._buckets)
        else:
            size = max((piece_bytes(bucket) for bucket in self._buckets if bucket.source_rank != stage), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]

    def _wait_until_gathered(self, deadline: float) -> None:
        """Return when this rank's parameters have been read."""
        if self._stream is None:
            return
        event = self._stream.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                raise WeightGroupError("the weights were not gathered in time")
            time.sleep(_POLL_SECONDS)


@dataclass(frozen=True)
class _Membership:
    """A group, and what belongs to it."""

    group: WeightGroup
    layout: Layout
    buffers: list[torch.Tensor]


def result_to_json(result: BroadcastResult) -> dict[str, Any]:
    """The result as the parent gets it."""
    return {"seconds": result.seconds, "bytes": result.bytes, "checksums": result.checksums}
