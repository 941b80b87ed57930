"""Receiving weights into an SGLang model, in its scheduler process."""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from relaxd.v1 import weights_pb2
from relaxd.weights.buckets import (
    Layout,
    ManifestError,
    ManifestMismatch,
    TensorBucket,
    begin_checksums,
    broadcast_layout,
    from_proto,
    piece_bytes,
    pieces,
    read_checksums,
    unpack,
)
from relaxd.weights.weight_group import Rendezvous, Transfer, WeightGroup, WeightGroupError
from services.rollout.engines.sglang.loader_copies import Destination, find_destinations

IN_FLIGHT = 2
"""Number of staging buffers: one receives while the other is copied."""

_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "UnquantizedFusedMoEMethod")
"""Names of SGLang's weight-storage classes that keep weights as in checkpoints."""

_OF_TOWER = re.compile(r"(^|\.)(visual|audio_tower)\.")
"""Matches Hugging Face's names of tower tensors."""


class UnsupportedModel(Exception):
    """Raised for a model with tensors derived from its weights, which an update would leave stale."""


@dataclass(frozen=True)
class ReceiveResult:
    """Result of receiving a weight broadcast on one rank."""

    seconds: float
    """Time until the device has finished receiving, in seconds."""
    touched: bool
    """True if the broadcast wrote to the model, which is certain if the model has any of its tensors."""
    checksums: dict[str, int] = field(default_factory=dict)
    """Checksums by tensor name, if requested. They cover the model's memory of tensors received in place, and else the
    staging buffer, which was compared with the model's memory."""
    towers_changed: bool = True
    """False if all tower tensors equal those of the previous version. Ranks that have received the same versions agree,
    because they compare checksums of whole tensors."""


class SGLangWeights:
    """Receives weights into one rank's part of a model, as a member of weight groups.

    Tensors that a parameter holds whole are received in place. Others are received into a buffer, from which this
    rank's parts are copied.
    """

    def __init__(self, model: Any, device: torch.device, tensor_size: int) -> None:
        """Raises UnsupportedModel for a model with derived copies of its weights, such as a quantised one."""
        check_model(model)
        self._model = model
        self._device = device
        self._complete = tensor_size == 1
        self._destinations: tuple[weights_pb2.WeightManifest, list[Destination]] | None = None
        self._lock = threading.Lock()
        self._receiver: _Receiver | None = None
        self._dirty = False
        self._towers: dict[str, int] = {}
        """Checksums of the tower tensors in the last received version, by name."""
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def join(self, rendezvous: Rendezvous, rank: int, manifest: weights_pb2.WeightManifest, timeout: float) -> None:
        """Check that a weight group's manifest matches the model exactly, and connect to the group.

        The model may generate meanwhile. Leaves any earlier group.

        Raises:
            ManifestMismatch: the message names the tensor.
            WeightGroupError: a member did not connect within `timeout` seconds, or `leave` was called meanwhile.
        """
        try:
            buckets = from_proto(manifest)
        except ManifestError as error:
            raise ManifestMismatch(str(error)) from error
        destinations = self._find(manifest, buckets)
        device = None if rendezvous.on_cpu else self._device
        group = WeightGroup(rendezvous, rank, device)
        receiver = _Receiver(
            group,
            buckets,
            destinations,
            model=self._model,
            layout=broadcast_layout(rendezvous.transport, "sglang"),
            device=device or torch.device("cpu"),
            touch=self._touch,
        )
        with self._lock:
            old, self._receiver = self._receiver, receiver
        if old is not None:
            old.group.abort()
        try:
            group.connect(timeout)
        except WeightGroupError:
            self.leave(group.name)
            raise

    def begin(self, name: str, timeout: float) -> "Reception":
        """Begin to receive one version; `finish` receives the rest. Nothing may use the model before `finish` returns.

        Raises:
            WeightGroupError: this rank isn't in the group, or the group broke.
        """
        started = time.monotonic()
        with self._lock:
            receiver = self._receiver
        if receiver is None or receiver.group.name != name:
            raise WeightGroupError(f"this engine is not in weight group {name}")
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # the last step before the pause may still be running
        with self._receiving(name):
            first = receiver.start(0, started + timeout)
        return Reception(name, receiver, first, started, started + timeout)

    def finish(self, begun: "Reception", *, checksum: bool, commit: Callable[[], None]) -> ReceiveResult:
        """Receive the rest of a version; call `commit` during the last transfer. Returns when the device has finished.

        A model that is spread over ranks counts as touched from `commit` on, because after a failure only some ranks
        may have committed, and these must not continue.

        Raises:
            WeightGroupError: a member died or was late, or the group was left meanwhile.
        """
        with self._receiving(begun.group_name):
            found = begun.receiver.finish(begun.first, begun.deadline, checksum, self._committing(commit))
            if self._stream is not None:
                self._stream.synchronize()
        touched, self._dirty = self._dirty, False
        before, self._towers = self._towers, {name: found[name] for name in begun.receiver.towers}
        changed = not before or before != self._towers
        return ReceiveResult(time.monotonic() - begun.started, touched, found if checksum else {}, changed)

    @contextlib.contextmanager
    def _receiving(self, name: str) -> Iterator[None]:
        """Run the block on the CUDA stream for weights; leave the weight group after an error."""
        stream = contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        try:
            with torch.no_grad(), stream:
                yield
        except BaseException:
            self.leave(name)
            raise

    @property
    def unusable(self) -> bool:
        """True if a failed or running broadcast may have changed the model."""
        return self._dirty

    def _committing(self, commit: Callable[[], None]) -> Callable[[], None]:
        """Return a function that calls `commit`, and first marks a model that is spread over ranks as touched."""

        def touch_and_commit() -> None:
            self._touch()
            commit()

        return commit if self._complete else touch_and_commit

    def _touch(self) -> None:
        self._dirty = True

    def leave(self, name: str) -> None:
        """Abort and forget a weight group; callable from any thread, also during `join` or `finish`."""
        with self._lock:
            receiver = self._receiver
            if receiver is None or receiver.group.name != name:
                return
            self._receiver = None
        receiver.group.abort()

    def _find(self, manifest: weights_pb2.WeightManifest, buckets: Sequence[TensorBucket]) -> list[Destination]:
        if self._destinations is None or self._destinations[0] != manifest:
            specs = [spec for bucket in buckets for spec in bucket.tensors]
            found = find_destinations(self._model, specs, complete=self._complete)
            self._destinations = (manifest, found)
        return self._destinations[1]


@dataclass(frozen=True)
class Reception:
    """Running reception of a version, whose first transfer has started."""

    group_name: str
    receiver: "_Receiver"
    first: Transfer
    started: float
    deadline: float
    """Time by which all buckets must have arrived, by time.monotonic()."""


class _Receiver:
    """Receives the broadcasts of one weight group, in separate buffers: an aborted broadcast may still write."""

    def __init__(
        self,
        group: WeightGroup,
        buckets: Sequence[TensorBucket],
        destinations: Sequence[Destination],
        *,
        model: Any,
        layout: Layout,
        device: torch.device,
        touch: Callable[[], None],
    ) -> None:
        self.group = group
        self._model = model
        self._buckets = buckets
        self._flat = layout == "flat"
        self._touch = touch
        rest = iter(destinations)
        self._parts = [[next(rest) for _ in bucket.tensors] for bucket in buckets]
        self._wholes = [[None if self._flat else part.whole() for part in parts] for parts in self._parts]
        self._staged = [
            [part for part, whole in zip(*each, strict=True) if whole is None]
            for each in zip(self._parts, self._wholes, strict=True)
        ]
        self._shapes = [
            TensorBucket(tuple(part.spec for part in staged), bucket.source_rank)
            for staged, bucket in zip(self._staged, buckets, strict=True)
        ]
        size = max((shape.nbytes if self._flat else piece_bytes(shape) for shape in self._shapes), default=0)
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT)]
        # These are made now, because the engine is paused while it receives.
        self._wires = [self._wire(number) for number in range(len(buckets))]
        """Tensors into which each bucket is received, by bucket number."""
        self._received = {
            part.spec.name: whole
            for part, whole in zip(chain(*self._parts), chain(*self._wholes), strict=True)
            if whole is not None
        }
        """The model's own tensors that are received in place, by name."""
        self.towers = frozenset(part.spec.name for part in destinations if _OF_TOWER.search(part.spec.name))
        """Names of the tower tensors."""

    def finish(
        self, first: Transfer, deadline: float, with_checksums: bool, commit: Callable[[], None]
    ) -> dict[str, int]:
        """Receive the other buckets on the current stream, and wait until all have arrived and are copied.

        Bucket n + 1 is received while bucket n is copied; the host does not wait in between. `commit` is called after
        the last transfer has started. Returns the checksums of all tensors; without `with_checksums`, only of tower
        tensors.
        """
        found: dict[str, torch.Tensor] = {}
        transfers = [first]
        for number in range(1, len(self._buckets)):
            transfers.append(self.start(number, deadline))
            found |= self._copy(number - 1, transfers[number - 1], with_checksums)
        commit()
        found |= self._copy(len(transfers) - 1, transfers[-1], with_checksums)
        for transfer in transfers:
            transfer.wait()  # brief: the transfer's deadline
        return read_checksums(found | self._begin_checksums(self._received, with_checksums))

    def start(self, number: int, deadline: float) -> Transfer:
        """Start to receive bucket `number`, and return the running transfer."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise WeightGroupError(f"the broadcast in weight group {self.group.name} did not end in time")
        if len(self._parts[number]) > len(self._staged[number]):
            self._touch()
        return self.group.start_broadcasts(self._wires[number], self._buckets[number].source_rank, left)

    def _wire(self, number: int) -> list[torch.Tensor]:
        buffer = self._buffers[number % IN_FLIGHT]
        if self._flat:
            return [buffer[: self._buckets[number].nbytes]]
        staging = iter(pieces(self._shapes[number], buffer))
        return [next(staging) if whole is None else whole for whole in self._wholes[number]]

    def _copy(self, number: int, transfer: Transfer, with_checksums: bool) -> dict[str, torch.Tensor]:
        """Copy a bucket's staged tensors into the model, and begin their checksums.

        On a GPU this only enqueues work, except for the comparisons of `with_checksums`.
        """
        staged, buffer = self._staged[number], self._buffers[number % IN_FLIGHT]
        if not staged:
            return {}
        transfer.precede_current_stream()
        if self._flat:
            tensors = [tensor for _, tensor in unpack(self._shapes[number], buffer)]
        else:
            tensors = pieces(self._shapes[number], buffer)
        for part, tensor in zip(staged, tensors, strict=True):
            if part.by_loader or part.copies:
                self._touch()
            if part.by_loader:
                self._model.load_weights([(part.spec.name, tensor)])
            for copy in part.copies:
                copy.target.copy_(copy.source(tensor))
                if with_checksums and not torch.equal(copy.target, copy.source(tensor).to(copy.target)):
                    raise WeightGroupError(f"{part.spec.name}: the model's memory differs from the received tensor")
        names = (part.spec.name for part in staged)
        return self._begin_checksums(dict(zip(names, tensors, strict=True)), with_checksums)

    def _begin_checksums(self, tensors: dict[str, torch.Tensor], every: bool) -> dict[str, torch.Tensor]:
        """Begin to compute checksums of `tensors`; without `every`, only of the tower tensors among them."""
        return begin_checksums(tensors if every else {name: tensors[name] for name in self.towers & tensors.keys()})


def check_model(model: torch.nn.Module) -> None:
    """Raise UnsupportedModel if the model computes with tensors that its loader doesn't fill."""
    if hasattr(model, "post_load_weights"):
        raise UnsupportedModel(
            f"{type(model).__name__} derives weights after loading (post_load_weights): they can't be replaced in place"
        )
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and kind not in _PLAIN_METHODS:
            raise UnsupportedModel(
                f"{name} stores its weights by {kind}, which converts them: serve the model unquantised"
            )
        if getattr(method, "use_flashinfer_trtllm_moe", False):
            raise UnsupportedModel(
                f"{name} rearranges its experts for flashinfer's TensorRT-LLM kernels: "
                'set moe_runner_backend to "triton"'
            )
        if getattr(module, "use_intel_amx_backend", False):
            raise UnsupportedModel(f"{name} packs its weights for AMX: they can't be replaced in place")
