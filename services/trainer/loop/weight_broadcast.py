"""Weight broadcasts: the buckets, membership in a weight group, and the pipelined broadcast.

Broadcasts run in threads beside training, on their own process groups. `WeightReadLock` keeps the optimizer from
changing the weights meanwhile.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice

import torch

from relaxd.engines import ENGINES
from relaxd.v1.trainer_pb2 import BroadcastWeightsResponse
from relaxd.weights.buckets import (
    Layout,
    TensorBucket,
    as_sent,
    broadcast_layout,
    checksums,
    pack,
    piece_bytes,
    pieces,
    plan_buckets,
)
from relaxd.weights.weight_group import Rendezvous, StockWeightGroup, Transfer, WeightGroup, WeightGroupError
from services.trainer.learner.learner import Learner

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Number of weight buckets in flight: one is sent while the next is filled."""
_POLL_SECONDS = 0.0005


def weight_buckets(learner: Learner, bucket_bytes: int, *, first_alone: bool = False) -> list[TensorBucket]:
    """Return all buckets of a weight broadcast, in order of pipeline stage. A bucket's source rank is its stage."""
    specs = learner.hf_tensor_specs()
    return [
        bucket
        for stage in range(learner.world.pp_size)
        for bucket in plan_buckets(
            [spec for spec in specs if spec.stage == stage],
            bucket_bytes,
            source_rank=stage,
            first_alone=first_alone,
        )
    ]


class WeightBroadcaster:
    """Joins this rank to weight groups, and sends its part of weight broadcasts.

    On a GPU, everything is enqueued on a stream beside training: the next bucket is gathered while one is sent, and the
    host waits only for the end. Tensors that Megatron stores in Hugging Face's layout are sent without a copy.
    """

    def __init__(self, learner: Learner, buckets: list[TensorBucket], engine: str) -> None:
        """`engine` is the receiving engine, rollout.engine."""
        self._learner = learner
        self._buckets = buckets
        self._engine = engine
        self._lock = threading.Lock()
        self._gathering = threading.Lock()
        """Lock on gathering tensors: a failed broadcast may still gather when the next one starts."""
        self._membership: _Membership | None = None
        device = learner.world.device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def join(self, rendezvous: Rendezvous, timeout: float) -> None:
        """Connect this rank with the engines in a new weight group. Abort the previous group.

        Raises:
            WeightGroupError: a member didn't join within `timeout` seconds, or `leave` was called meanwhile.
        """
        world = self._learner.world
        device = None if rendezvous.on_cpu else world.device
        kind = StockWeightGroup if ENGINES[self._engine].stock_weight_group else WeightGroup
        group = kind(rendezvous, world.pp_rank, device)
        layout = broadcast_layout(rendezvous.transport, self._engine)
        membership = _Membership(group, layout, self._make_buffers(layout, device or torch.device("cpu")))
        with self._lock:
            old, self._membership = self._membership, membership
        if old is not None:
            old.group.abort()
        try:
            group.connect(timeout)
        except WeightGroupError:
            self.leave(group.name)
            raise

    def leave(self, name: str) -> None:
        """Abort a weight group, even during a broadcast, and leave it. Do nothing if this rank isn't in the group."""
        with self._lock:
            membership = self._membership
            if membership is None or membership.group.name != name:
                return
            self._membership = None
        membership.group.abort()

    def broadcast(self, name: str, timeout: float, with_checksums: bool) -> BroadcastWeightsResponse:
        """Gather and send this rank's part of a weight broadcast. All ranks with parts of the weights call it together.

        Returns this rank's seconds, and the bytes and checksums of the buckets that it sends.

        Raises:
            WeightGroupError: this rank isn't in the group; a member died or was late; the group was left meanwhile.
        """
        started = time.monotonic()
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        with self._gathering, torch.no_grad(), stream:
            return self._broadcast(name, started, timeout, with_checksums)

    def _broadcast(self, name: str, started: float, timeout: float, with_checksums: bool) -> BroadcastWeightsResponse:
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
            # Gathering is collective: if this rank stopped halfway, the others would wait for it.
            for _ in tensors:
                pass
        self._wait_until_gathered(started + timeout)
        return BroadcastWeightsResponse(seconds=time.monotonic() - started)

    def _send(
        self,
        membership: "_Membership",
        tensors: Iterator[tuple[str, torch.Tensor]],
        deadline: float,
        started: float,
        with_checksums: bool,
    ) -> BroadcastWeightsResponse:
        group, stage = membership.group, self._learner.world.pp_rank
        transfers: list[Transfer] = []
        kept: deque[list[torch.Tensor]] = deque()
        """References that keep tensors alive while they are sent: at most IN_FLIGHT buckets."""
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
                raise WeightGroupError(f"the broadcast in weight group {group.name} exceeded its deadline")
            transfers.append(group.start_broadcasts(wire, bucket.source_rank, left))
            kept.append(wire)
        for transfer in transfers:
            transfer.wait()  # brief: the transfer's deadline
        return BroadcastWeightsResponse(seconds=time.monotonic() - started, bytes=sent, checksums=found)

    def _make_buffers(self, layout: Layout, device: torch.device) -> list[torch.Tensor]:
        """Allocate the buffers through which buckets are sent and received.

        The flat layout packs every bucket into a buffer; others need buffers only for other stages' buckets. Each
        weight group has new buffers, because an aborted transfer may still read old ones.
        """
        stage = self._learner.world.pp_rank
        if layout == "flat":
            size = max(bucket.nbytes for bucket in self._buckets)
        else:
            size = max((piece_bytes(bucket) for bucket in self._buckets if bucket.source_rank != stage), default=0)
        return [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]

    def _wait_until_gathered(self, deadline: float) -> None:
        """Wait until the GPU has gathered the weights, so that the optimizer may change them."""
        if self._stream is None:
            return
        event = self._stream.record_event()
        while not event.query():
            if time.monotonic() > deadline:
                raise WeightGroupError("gathering the weights exceeded the broadcast's deadline")
            time.sleep(_POLL_SECONDS)  # brief: the transfer's deadline


@dataclass(frozen=True)
class _Membership:
    """A weight group with its layout and buffers."""

    group: WeightGroup
    layout: Layout
    buffers: list[torch.Tensor]
