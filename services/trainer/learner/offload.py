"""Weights, gradients and optimizer state between the device and the host's memory, to the bit.

A tensor's storage is emptied and filled again in place: parameters, Megatron's buffers that they are views of, and
whatever else refers to them stay what they are. verl and slime do the same for colocated training
(verl.utils.megatron_utils.offload_megatron_model_to_cpu).
"""

from collections.abc import Iterable, Iterator
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import psutil
import torch
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from services.trainer.learner.data_parallel import DataParallel

CHUNK_BYTES = 256 << 20
"""The host's memory is taken in pieces of this size: pinned memory is handed out in powers of two."""
ALIGNMENT = 512
"""Tensors begin at multiples of this many bytes of the host's memory."""


class Offload:
    """Moves the storages behind some tensors away from their device and back. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the tensors are that are moved; others are left where they are."""
        self._device = device
        self._chunks: list[Tensor] = []
        self._away: list[tuple[torch.UntypedStorage, int, int | None]] = []
        """Storage, its bytes, and where its content is in the host's memory; None: nowhere, it was zero."""

    @property
    def away(self) -> bool:
        """Whether the tensors are in the host's memory."""
        return bool(self._away)

    def offload(self, tensors: Iterable[Tensor], zeros: Iterable[Tensor] = ()) -> None:
        """Free the device's memory behind tensors, keeping their content; of `zeros` only their size.

        The tensors must not be used until `onload`.
        """
        if self._away:
            raise RuntimeError("the tensors are in the host's memory already")
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
        """Bring everything back to where it was."""
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
            self._chunks.clear()  # pinned memory takes long to get, so on GPUs it is kept

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        """The storages on the device, each once, in order."""
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
            # Off GPUs the last one needs to be no larger than what is put into it.
            length = CHUNK_BYTES if pinned else min(CHUNK_BYTES, left)
            self._chunks.append(torch.empty(length, dtype=torch.uint8, pin_memory=pinned))

    def _parts(self, storage: torch.UntypedStorage, size: int, place: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A storage and its place in the host's memory, chunk after chunk."""
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


def gradient_tensors(model: DataParallel) -> list[Tensor]:
    """Megatron's gradient buffers."""
    return [buffer.grad_data for buffer in [*model.buffers, *model.expert_parallel_buffers]]


def state_tensors(models: Iterable[torch.nn.Module], optimizer: MegatronOptimizer) -> list[Tensor]:
    """Parameters and buffers of models, main weights, and the optimizer's moments: all that a step leaves behind."""
    tensors: list[Tensor] = []
    for model in models:
        tensors += [parameter.data for parameter in model.parameters()]
        tensors += list(model.buffers())
    for inner in _torch_optimizers(optimizer):
        tensors += [parameter.data for group in inner.param_groups for parameter in group["params"]]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return tensors


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    chained = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    return [one.optimizer for one in chained if one.optimizer is not None]


def memory_in_use(device: torch.device) -> int:
    """Bytes in use: of the whole GPU, whoever uses them; on a CPU of this process."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free
    return int(psutil.Process().memory_info().rss)
