"""The place of each checkpoint tensor in an SGLang model, recorded from the model's own loader.

SGLang has its own layout of parameters (query, key and value in one matrix, experts in one tensor, slices by tensor
parallel rank, padded vocabularies), which each model's `load_weights` implements. That loader runs once on tensors
without data, and its copies are recorded instead of made. Received tensors are then copied as recorded, so there is no
table of names and layouts to keep in step with the models.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from relaxd.weights.buckets import ManifestMismatch, TensorSpec

logger = logging.getLogger(__name__)

_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)


@dataclass(frozen=True)
class Copy:
    """A strided part of a checkpoint tensor, and its target in a parameter."""

    target: torch.Tensor
    """View of the parameter's memory."""
    stride: tuple[int, ...]
    """Strides of the source in the contiguous checkpoint tensor, in elements. Its shape is the shape of the target."""
    offset: int
    """Offset of the source in the checkpoint tensor, in elements."""

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the source part of a received checkpoint tensor, as a view."""
        return tensor.as_strided(self.target.shape, self.stride, tensor.storage_offset() + self.offset)

    @property
    def places(self) -> tuple[Any, ...]:
        """Identity of the copy's target and source memory, for comparing copies."""
        return _place(self.target), self.stride, self.offset


@dataclass
class Destination:
    """Destination of a checkpoint tensor in the model: copies to parameters, or the model's loader."""

    spec: TensorSpec
    copies: list[Copy] = field(default_factory=list)
    """Copies from the checkpoint tensor to parameters; empty if only other ranks need the tensor."""
    by_loader: bool = False
    """True if the model's `load_weights` must load this tensor, because it does more than copy."""

    def whole(self) -> torch.Tensor | None:
        """Return the parameter memory that can receive the tensor directly; None if the tensor must be copied."""
        if self.by_loader or len(self.copies) != 1:
            return None
        (copy,) = self.copies
        target = copy.target
        same = target.dtype == self.spec.dtype and tuple(target.shape) == self.spec.shape
        return target if same and target.is_contiguous() and copy.offset == 0 else None


class _NotJustCopies(Exception):
    """Raised when a model's loader does more than copy tensors."""


class _Recorder(TorchDispatchMode):
    """Records copies from tensors without data, and keeps the model unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[int, Copy]] = []
        """Recorded copies, each after the storage id of its source."""
        self.filled: list[torch.Tensor] = []
        self.derived: dict[int, set[int]] = {}
        """For each tensor computed from tensors without data, by its storage id: the storage ids of those tensors."""
        self.consumed: set[int] = set()
        """Storage ids of tensors from which a copied tensor was computed."""
        self._alive: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        empty = [tensor for tensor in tensors if tensor.device.type == "meta"]
        if func is _aten.copy_.default and args[0].device.type != "meta" and args[1].device.type == "meta":
            self._copied(args[0], args[1])
            return args[0]
        if func in _FILLS and not empty:
            self.filled.append(args[0])
            return args[0]
        if not empty:
            if func._schema.is_mutable:
                raise _NotJustCopies(f"{func} on the model's own memory")
            return func(*args, **kwargs)
        if func is _aten._to_copy.default:
            kwargs.pop("device", None)
        result = func(*args, **kwargs)
        inputs = {_storage(tensor) for tensor in empty}
        for output in torch.utils._pytree.tree_leaves(result):
            if isinstance(output, torch.Tensor) and _storage(output) not in inputs:
                self._alive.append(output)  # a freed storage's address could be reused
                self.derived[_storage(output)] = set().union(*(self.derived.get(i, {i}) for i in inputs))
        return result

    def _copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        storage = _storage(source)
        if storage in self.derived:
            self.consumed |= self.derived[storage]
        elif target.shape != source.shape:
            raise ManifestMismatch(f"{tuple(source.shape)} doesn't fit into {tuple(target.shape)}")
        else:
            self.copies.append((storage, Copy(target, source.stride(), int(source.storage_offset()))))


def find_destinations(
    model: Any,
    specs: Sequence[TensorSpec],
    *,
    complete: bool,
) -> list[Destination]:
    """Return the place of each tensor in an SGLang model, in the order of `specs`. Does not change the model.

    `complete`: True if this process holds the whole model, so that it must use every tensor as a whole.
    Raises ManifestMismatch for a tensor that the model lacks or has in another shape, and for a parameter that would
    not be written exactly once.
    """
    empty = [torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in specs]
    destinations = [Destination(spec) for spec in specs]
    numbers = {_storage(tensor): number for number, tensor in enumerate(empty)}
    recorder = _Recorder()
    begin, current = 0, 0

    def remaining() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for current in range(begin, len(specs)):
            yield specs[current].name, empty[current]

    while begin < len(specs):
        try:
            with torch.no_grad(), recorder:
                model.load_weights(remaining())
            begin = len(specs)
        except ManifestMismatch as error:
            raise ManifestMismatch(f"{specs[current].name}: {error}") from error
        except (AssertionError, IndexError, RuntimeError, ValueError, _NotJustCopies) as error:
            # A loader that reads values fails on a tensor without data: call it with the received tensor later.
            if not isinstance(error, NotImplementedError | _NotJustCopies) and "meta" not in str(error):
                raise ManifestMismatch(
                    f"{specs[current].name}: the model's loader refuses the shape {specs[current].shape}: {error}"
                ) from error
            logger.warning("%s is loaded by the model's own loader: %s", specs[current].name, error)
            destinations[current].by_loader = True
            begin = current + 1
    for storage, copy in recorder.copies:
        copies = destinations[numbers[storage]].copies
        if copy.places not in (other.places for other in copies):  # SGLang loads tied embeddings of Qwen3-VL twice
            copies.append(copy)
    for storage in recorder.consumed:
        destinations[numbers[storage]].by_loader = True
    _check_use(destinations, complete)
    if not any(destination.by_loader for destination in destinations):
        filled = {_place(tensor): tensor for tensor in recorder.filled}
        _check_coverage(model, destinations, list(filled.values()), complete)
    return destinations


def _check_use(destinations: Sequence[Destination], complete: bool) -> None:
    for destination in destinations:
        spec = destination.spec
        if destination.by_loader:
            continue
        used = sum(copy.target.numel() for copy in destination.copies)
        if used == 0 and (complete or ".experts." not in spec.name):  # other ranks may have all experts
            raise ManifestMismatch(f"{spec.name}: the model has no such tensor")
        if complete and used % torch.Size(spec.shape).numel():
            raise ManifestMismatch(f"{spec.name}: the shape is {spec.shape}, but the model uses only a part of it")


def _check_coverage(
    model: torch.nn.Module, destinations: Sequence[Destination], filled: Sequence[torch.Tensor], complete: bool
) -> None:
    """Raise ManifestMismatch unless every element of every parameter is written, and none twice.

    Loaders pad a vocabulary with zeros. On a CPU they pad any tensor that is too small, which is right only under
    tensor parallelism.
    """
    written: dict[int, list[torch.Tensor]] = {}
    for tensor in (copy.target for destination in destinations for copy in destination.copies):
        written.setdefault(_storage(tensor), []).append(tensor)
    padding: dict[int, list[torch.Tensor]] = {}
    for tensor in filled:
        padding.setdefault(_storage(tensor), []).append(tensor)
    for prefix, module in model.named_modules():
        padded = not complete or hasattr(module, "org_vocab_size")
        for leaf, parameter in module.named_parameters(recurse=False):
            storage, name = _storage(parameter), f"{prefix}.{leaf}"
            parts = [*written.get(storage, []), *(padding.get(storage, []) if padded else [])]
            parts = [part for part in parts if part.numel()]
            places = {_place(part) for part in parts}
            count = sum(part.numel() for part in parts)
            if len(places) < len(parts) or count > parameter.numel():
                raise ManifestMismatch(f"{name}: the manifest has parts of it twice")
            if count < parameter.numel():
                raise ManifestMismatch(f"{name}: the manifest does not have this tensor, or not all of it")


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a view's identity: storage, offset, shape and strides."""
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def _storage(tensor: torch.Tensor) -> int:
    """Return a unique id of the tensor's storage; works for tensors without data too."""
    return tensor.untyped_storage()._cdata
