"""Activations on the host: the layers' saved tensors in pinned memory instead of the GPU's.

The forward pass copies each tensor to the host on a separate stream without waiting. The backward pass fetches tensors
slightly before their use. A bounded pool of pinned memory holds them; tensors that don't fit stay on the GPU.
"""

import logging
import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from services.trainer.transformer.recompute import Deferred, unpack

logger = logging.getLogger(__name__)

BLOCK_BYTES = 4 << 20
"""Size of the pool's blocks, in bytes."""
CHUNK_BYTES = 256 << 20
"""Size of host allocations, in bytes. A power of two, because pinned memory is allocated in powers of two."""
LEAST_BYTES = 1 << 20
"""Minimum size of tensors moved off a GPU, in bytes."""


class ActivationOffload:
    """Moves saved tensors to the host, and fetches them back in reverse order."""

    def __init__(self, device: torch.device, limit: int, ahead: int) -> None:
        """Use at most `limit` bytes of the host's memory.

        Args:
            device: device of the activations. On CPU they are copied all the same, without a stream.
            limit: bytes, rounded down to blocks.
            ahead: number of tensors whose copies may be under way, in each direction.
        """
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None
        self._ahead = ahead
        self._pool = _Pool(limit, pinned=self._cuda)
        self._leaving: deque[weakref.ref[_Away]] = deque()
        """Tensors being copied to the host, oldest first: their GPU memory isn't free yet."""
        self._saved: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        """Offloaded tensors, numbered in the order of saving."""
        self._by_storage: weakref.WeakValueDictionary[int, _Away] = weakref.WeakValueDictionary()
        """Storages that are still on the GPU, by address: several saved tensors may share one."""
        self._count = 0
        self._limit, self._full = limit, False
        self._staying: set[int] = set()
        self.moved_bytes = 0
        """Bytes moved to the host since the beginning."""

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
        """Start moving a tensor to the host. Return the argument for `unpack`: the tensor itself if it stays."""
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
        return _View(away, tensor)

    def reset(self) -> None:
        """Wait for copies of aborted passes."""
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
        """Start fetching tensor number `order`, and the tensors that the backward pass uses soon after it."""
        for number in range(order, max(order - self._ahead, 0) - 1, -1):
            away = self._saved.get(number)
            if away is not None:
                away.copy_in(self._stream)

    def give_back(self, blocks: list[Tensor]) -> None:
        """Return a tensor's blocks to the pool. On the stream, copies out of them run before later copies into them."""
        self._pool.give(blocks)


class _Pool:
    """Blocks of the host's memory, allocated in chunks on first use."""

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
        """Take blocks back."""
        self._free += blocks


class _Away:
    """An offloaded storage: on the host, on the GPU, or in transit. Only saved tensors (`_View`) keep it alive."""

    def __init__(self, owner: ActivationOffload, order: int, content: Tensor, blocks: list[Tensor]) -> None:
        self._owner, self._order = owner, order
        self._content: Tensor | None = content
        self._size, self._device = content.numel(), content.device
        self._blocks = blocks
        self._copied: Any = None
        """Event after the last copy, if the GPU's stream hasn't waited for it yet."""
        self.address = content.data_ptr()

    def copy_out(self, stream: Any) -> None:
        """Start copying to the host."""
        assert self._content is not None
        self._copy([*zip(self._blocks, self._content.split(BLOCK_BYTES), strict=True)], stream)

    def copy_in(self, stream: Any) -> None:
        """Start copying to the GPU, unless it is there."""
        if self._content is None:
            self._content = torch.empty(self._size, dtype=torch.uint8, device=self._device)
            self._copy([*zip(self._content.split(BLOCK_BYTES), self._blocks, strict=True)], stream)

    def free_device(self) -> None:
        """Free the GPU's memory, after the copy."""
        self._wait()
        self._content = None

    def content(self) -> Tensor:
        """Return the bytes on the GPU, for use in its current stream."""
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


class _View(Deferred):
    """A saved tensor whose storage is offloaded."""

    def __init__(self, away: _Away, tensor: Tensor) -> None:
        self._away = away
        self._dtype, self._geometry = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def __call__(self) -> Tensor:
        """Return the tensor on the device."""
        content = self._away.content()
        return torch.empty(0, dtype=self._dtype, device=content.device).set_(content.untyped_storage(), *self._geometry)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
