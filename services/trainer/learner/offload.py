"""Offloading of weights, gradients and optimizer state to the host's memory and back, bit for bit.

A tensor's storage is freed and refilled in place, so that parameters, views of Megatron's buffers and all other
references stay valid. verl and slime do the same for colocated training
(verl.utils.megatron_utils.offload_megatron_model_to_cpu).
"""

from collections.abc import Iterable, Iterator

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import ctypes

import psutil
import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from services.trainer.learner.optimizer import single_optimizers

CHUNK_BYTES = 256 << 20
"""Size of host memory allocations, in bytes. A power of two, because pinned memory is allocated in powers of two."""
ALIGNMENT = 512
"""Alignment of tensors in the host's memory, in bytes."""


class Offload:
    """Moves tensors' storages from the device to the host and back. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """`device`: device whose tensors are moved; others stay where they are."""
        self._device = device
        self._chunks: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int, int | None]] = []
        """Freed storages, each with its size in bytes, and its content's offset in host memory or None for zeros."""

    @property
    def away(self) -> bool:
        """True if the tensors are in the host's memory."""
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor], zeros: Iterable[Tensor] = ()) -> None:
        """Free the device memory of tensors, keeping the content of `tensors` and only the size of `zeros`.

        The tensors must not be used until `onload`.
        """
        if self._away:
            raise RuntimeError("the tensors are already in the host's memory")
        empty = {storage.data_ptr(): storage for storage in self._storages(zeros)}
        offset = 0
        for storage in self._storages([*tensors, *zeros]):
            if storage.data_ptr() in empty:
                self._away.append((storage, storage.nbytes(), None))
                continue
            self._away.append((storage, storage.nbytes(), offset))
            offset += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        self._reserve(offset)
        for storage, size, place in self._away:
            if place is not None:
                for device_part, host_part in self._parts(storage, size, place):
                    host_part.copy_(device_part, non_blocking=True)
        self._synchronize()
        for storage, _, _ in self._away:
            storage.resize_(0)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move all offloaded tensors back to the device."""
        for storage, size, place in self._away:
            storage.resize_(size)
            if place is None:
                _bytes_of(storage, self._device).zero_()
                continue
            for device_part, host_part in self._parts(storage, size, place):
                device_part.copy_(host_part, non_blocking=True)
        self._synchronize()
        self._away.clear()
        if self._device.type != "cuda":
            self._chunks.clear()  # on GPUs the memory is kept, because allocating pinned memory is slow

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """Return the storages of those tensors that are on the device, without duplicates, in order."""
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == self._device.type and storage.nbytes():
                found.setdefault(storage.data_ptr(), storage)
        return list(found.values())

    def _reserve(self, size: int) -> None:
        pinned = self._device.type == "cuda"
        while len(self._chunks) * CHUNK_BYTES < size:
            left = size - len(self._chunks) * CHUNK_BYTES
            # Unpinned memory need not be allocated in whole chunks.
            length = CHUNK_BYTES if pinned else min(CHUNK_BYTES, left)
            self._chunks.append(torch.empty(length, dtype=torch.uint8, pin_memory=pinned))

    def _parts(self, storage: torch.UntypedStorage, size: int, place: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the parts of a storage, each with the part of a host chunk of the same size that holds its content."""
        whole, done = _bytes_of(storage, self._device), 0
        while done < size:
            chunk, start = divmod(place + done, CHUNK_BYTES)
            length = min(size - done, CHUNK_BYTES - start)
            yield whole[done : done + length], self._chunks[chunk][start : start + length]
            done += length

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def state_tensors(models: Iterable[torch.nn.Module], optimizer: MegatronOptimizer) -> list[Tensor]:
    """Return parameters and buffers of the models, and main weights and moments of the optimizer."""
    tensors: list[Tensor] = []
    for model in models:
        tensors += [parameter.data for parameter in model.parameters()]
        tensors += list(model.buffers())
    for inner in (one.optimizer for one in single_optimizers(optimizer) if one.optimizer is not None):
        tensors += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def memory_in_use(device: torch.device) -> int:
    """Return the bytes of memory in use: on a GPU by all processes, on a CPU by this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(psutil.Process().memory_info().rss)


TRIM_EVERY_STEPS = 100
"""Interval between calls of `trim_heap`, in steps."""


def trim_heap() -> None:
    """Return free pages of the heap to the system. Does nothing without glibc.

    A step allocates tensors of all sizes between small long-lived objects, which fragments the heap. A learner with a
    tiny model grew by 21 kB a step without this and by 3 kB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
