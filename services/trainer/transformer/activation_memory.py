"""Less GPU memory for activations: selective recomputation, and offloading to the host.

Recomputation: the backward pass computes tensors again instead of keeping them.

Offloading: the layers' saved tensors are in pinned memory of the host instead of the GPU's. The forward pass copies
each tensor to the host on a separate stream without waiting. The backward pass fetches tensors slightly before their
use. A bounded pool of pinned memory holds them; tensors that don't fit stay on the GPU.
"""

import logging
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor


class Deferred(ABC):
    """Placeholder that autograd saves instead of a tensor. Calling it returns the tensor."""

    @abstractmethod
    def __call__(self) -> Tensor:
        """Return the tensor that this placeholder stands for."""


class Recompute:
    """Context for recomputation: autograd saves a recipe instead of a tensor that was computed by calling the context.

    The backward pass runs the recipe at the tensor's first use and frees the tensor after its last use. A chain of
    recipes keeps only the first one's arguments. Any operation that saves tensors with `save_for_backward` is covered.
    Tensors without a recipe are saved as usual.
    """

    def __init__(self, active: bool = True, keep: Callable[[Tensor], Tensor | Deferred] | None = None) -> None:
        """Save all tensors as usual if `active` is False or gradients are disabled.

        Args:
            active: whether tensors are recomputed.
            keep: converts tensors that aren't recomputed to what autograd saves; None: they are saved unchanged.
        """
        self._keep = keep or (lambda tensor: tensor)
        self._hooks: Any = None
        if active and torch.is_grad_enabled():
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)
        self._made: dict[int, tuple[Tensor, _Recipe, int]] = {}
        """Recomputable tensors by storage address: tensor, recipe, index of its output. The reference keeps the storage
        of the tensor from being reused."""

    @property
    def active(self) -> bool:
        """True if the backward pass recomputes tensors."""
        return self._hooks is not None

    def __enter__(self) -> Self:
        """Install the autograd hooks that save, in place of a tensor, the function and arguments to recompute it."""
        if self._hooks is not None:
            self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the autograd hooks. Saved recipes stay alive in autograd's graph."""
        if self._hooks is not None:
            self._hooks.__exit__(kind, error, trace)
        self._made.clear()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments), a tensor or a tuple of tensors that the backward pass recomputes.

        The function must be deterministic.
        """
        output = function(*arguments)
        self.register(output, function, *arguments)
        return output

    def register(self, output: Any, function: Callable[..., Any], *arguments: Any) -> None:
        """Let the backward pass recompute tensors by a function, which may differ from that of the forward pass.

        Args:
            output: the tensor or tuple of tensors. A view of an argument is saved as usual, at no cost.
            function: function that returns the same values as `output`.
            *arguments: arguments of the function.
        """
        if self._hooks is None:
            return
        recipe = _Recipe(function, [self._kept(argument) for argument in arguments])
        argument_storages = {_storage(argument) for argument in arguments if isinstance(argument, Tensor)}
        for index, tensor in enumerate(output if isinstance(output, tuple) else (output,)):
            if _storage(tensor) not in argument_storages:
                self._made[_storage(tensor)] = tensor, recipe, index

    def _kept(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        made = self._made.get(_storage(argument))
        return self._keep(argument.detach()) if made is None else made[1].view(argument, made[2])

    def _pack(self, tensor: Tensor) -> Any:
        made = self._made.get(_storage(tensor))
        return self._keep(tensor) if made is None else made[1].view(tensor, made[2])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def unpack(saved: Tensor | Deferred) -> Tensor:
    """Return the tensor that autograd saved, directly or as a placeholder."""
    return saved() if isinstance(saved, Deferred) else saved


class _Recipe:
    """A function and its arguments, from which tensors can be recomputed."""

    def __init__(self, function: Callable[..., Any], arguments: list[Any]) -> None:
        self._function = function
        self._arguments = arguments
        self._outputs: tuple[Tensor, ...] | None = None
        self._uses = 0

    def view(self, like: Tensor, index: int) -> "_RecipeOutput":
        """Return a placeholder for output `index`, with shape and strides of `like`. Count a use of the recipe."""
        self._uses += 1
        return _RecipeOutput(self, index, like.shape, like.stride(), int(like.storage_offset()))

    def take(self, index: int) -> Tensor:
        """Return output `index`. Recompute all outputs at the first use, and free them after the last."""
        self._uses -= 1
        if self._outputs is None:
            with torch.no_grad():
                outputs = self._function(*(a() if isinstance(a, Deferred) else a for a in self._arguments))
            self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        tensor = self._outputs[index]
        if self._uses <= 0:
            self._outputs = None
        return tensor


class _RecipeOutput(Deferred):
    """Placeholder for one use of a recipe's output."""

    def __init__(self, recipe: _Recipe, index: int, shape: torch.Size, stride: tuple[int, ...], offset: int) -> None:
        self._recipe = recipe
        self._index = index
        self._geometry = shape, stride, offset

    def __call__(self) -> Tensor:
        """Return the output, and recompute it if necessary."""
        shape, stride, offset = self._geometry
        tensor = self._recipe.take(self._index)
        if (tensor.shape, tensor.stride(), tensor.storage_offset()) == (shape, stride, offset):
            return tensor
        return tensor.as_strided(shape, stride, offset)


logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
"""Size of a block in the pool of host memory, in bytes."""
CHUNK_BYTES = 256 << 20
"""Size of the pool's host allocations, in bytes: a power of two, as pinned memory is allocated in powers of two."""
LEAST_BYTES = 1 << 20
"""Minimum size of tensors that are offloaded from a GPU, in bytes."""


class ActivationOffload:
    """Moves saved tensors to the host, and fetches them back in reverse order."""

    def __init__(self, device: torch.device, limit: int, ahead: int) -> None:
        """Create an empty pool of host memory, which grows to at most `limit` bytes.

        Args:
            device: device of the activations. On CPU, tensors are copied as well, without a stream.
            limit: bytes, rounded down to blocks.
            ahead: number of tensors whose copies may be under way, in each direction.
        """
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._ahead = ahead
        self._pool = _Pool(limit, pinned=self._cuda)
        self._leaving: deque[weakref.ref[_Away]] = deque()
        """Storages being copied to the host, oldest first. Their GPU memory isn't free yet."""
        self._saved: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        """Offloaded storages, by their number in the order of saving."""
        self._by_storage: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        """Storages still on the GPU, by address. Several saved tensors may share a storage."""
        self._count = 0
        self._limit, self._full = limit, False
        self._staying: set[int] = set()
        self.moved_bytes = 0
        """Bytes of activations moved to the host so far, in all passes."""

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory allocated so far."""
        return self._pool.allocated

    def saving(self, staying: Iterable[Tensor]) -> AbstractContextManager[Any]:
        """Return a context in which autograd saves tensors on the host, except `staying`, such as parameters."""
        if not torch.is_grad_enabled():
            return nullcontext()
        self._staying = {_address(tensor) for tensor in staying}
        return torch.autograd.graph.saved_tensors_hooks(self.pack, unpack)

    def pack(self, tensor: Tensor) -> "Tensor | Deferred":
        """Start to move a tensor to the host. Return its placeholder, or the tensor itself if it stays."""
        storage = tensor.untyped_storage()
        size, address = storage.nbytes(), _address(tensor)
        if tensor.is_cuda != self._cuda or size < (LEAST_BYTES if self._cuda else 1) or address in self._staying:
            return tensor
        away = self._by_storage.get(address)
        if away is None:
            blocks = self._pool.take(size)
            if blocks is None:
                if not self._full:
                    logger.warning(
                        "trainer.activation_offload_bytes = %d are in use: further activations stay on the GPU",
                        self._limit,
                    )
                self._full = True
                return tensor
            content = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            away = _Away(self, self._count, content, blocks)
            self._saved[self._count] = self._by_storage[address] = away
            self._count += 1
            self.moved_bytes += size
            self._leave(away)
        return _OffloadedTensor(away, tensor)

    def reset(self) -> None:
        """Wait for copies that aborted passes left under way."""
        if self._cuda:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._leaving.clear()
        self._by_storage.clear()

    def _leave(self, away: "_Away") -> None:
        away.copy_out(self._stream)
        self._leaving.append(weakref.ref(away))
        while len(self._leaving) > self._ahead:
            oldest = self._leaving.popleft()()
            if oldest is not None:
                self._by_storage.pop(oldest.address, None)
                oldest.free_device()

    def fetch(self, order: int) -> None:
        """Start to fetch storage number `order`, and the storages that the backward pass needs soon afterwards."""
        for number in range(order, max(order - self._ahead, 0) - 1, -1):
            away = self._saved.get(number)
            if away is not None:
                away.copy_in(self._stream)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Return a storage's blocks to the pool. The stream's order protects copies that still read the blocks."""
        self._pool.give(blocks)


class _Pool:
    """Pool of host memory blocks, allocated in chunks on first use."""

    def __init__(self, limit: int, *, pinned: bool) -> None:
        self._left = limit // BLOCK_BYTES
        self._pinned = pinned
        self._free: list[Tensor] = []
        self.allocated = 0

    def take(self, size: int) -> list[Tensor] | None:
        """Return blocks for `size` bytes; None if the limit doesn't allow them."""
        count = -(-size // BLOCK_BYTES)
        if count > len(self._free) + self._left:
            return None
        while len(self._free) < count:
            blocks = min(CHUNK_BYTES // BLOCK_BYTES, self._left)
            self._left -= blocks
            self.allocated += blocks * BLOCK_BYTES
            chunk = torch.empty(blocks * BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)
            self._free += chunk.split(BLOCK_BYTES)
        taken, self._free = self._free[-count:], self._free[:-count]
        return taken

    def give(self, blocks: list[Tensor]) -> None:
        """Return blocks to the pool."""
        self._free += blocks


class _Away:
    """An offloaded storage: on the host, on the GPU, or in transit. Only `_OffloadedTensor` keeps it alive."""

    def __init__(self, owner: ActivationOffload, order: int, content: Tensor, blocks: list[Tensor]) -> None:
        self._owner, self._order = owner, order
        self._content: Tensor | None = content
        self._size, self._device = content.numel(), content.device
        self._blocks = blocks
        self._copied: Any = None
        """CUDA event after the last copy; None once the stream that uses the storage waits for it."""
        self.address = content.data_ptr()

    def copy_out(self, stream: Any) -> None:
        """Start to copy the storage to the host."""
        assert self._content is not None
        self._copy([*zip(self._blocks, self._content.split(BLOCK_BYTES), strict=True)], stream)

    def copy_in(self, stream: Any) -> None:
        """Start to copy the storage to the GPU, unless it is there."""
        if self._content is None:
            self._content = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._copy([*zip(self._content.split(BLOCK_BYTES), self._blocks, strict=True)], stream)

    def free_device(self) -> None:
        """Free the storage's GPU memory once the copy to the host is done."""
        self._wait()
        self._content = None

    def content(self) -> Tensor:
        """Return the storage's bytes on the GPU, for use in the current stream: uint8 [size]."""
        self._owner.fetch(self._order)
        self._wait()
        assert self._content is not None
        return self._content

    def _copy(self, parts: list[tuple[Tensor, Tensor]], stream: Any) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for into, content in parts:
                into[: len(content)].copy_(content[: len(into)], non_blocking=True)
            if stream is not None:
                self._copied = stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
            self._copied = None

    def __del__(self) -> None:
        self._wait()  # other tensors reuse the GPU's memory
        self._owner.give_back(self._blocks)


class _OffloadedTensor(Deferred):
    """Placeholder for a saved tensor whose storage is offloaded."""

    def __init__(self, away: _Away, tensor: Tensor) -> None:
        self._away = away
        self._dtype, self._geometry = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def __call__(self) -> Tensor:
        """Return the tensor, fetched to its device."""
        content = self._away.content()
        return torch.empty(0, dtype=self._dtype, device=content.device).set_(content.untyped_storage(), *self._geometry)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
