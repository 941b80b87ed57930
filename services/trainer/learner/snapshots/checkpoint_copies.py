"""Copies of a learner's state in the host's memory, made during the next step's forward and backward pass.

Only the optimizer step changes weights and optimizer state, so a snapshot need not copy them at once. It plans its
files with uninitialised tensors, which a thread fills; the next optimizer step waits for the thread.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.learner.bfloat16_moments import MOMENTS, moments_dtype

STATE = ("param", *MOMENTS)
"""The distributed optimizer's state of each parameter."""
STAGING_BYTES = 32 << 20
"""Size of each of two pinned buffers between GPU and host: the GPU fills one while the host empties the other."""


class HostMemory:
    """Host tensors that one snapshot after the other uses: memory from the system is slow while it is new."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._taken = 0

    def begin(self) -> None:
        """Start again with the first tensor."""
        self._taken = 0

    def take(self, shape: Any, dtype: torch.dtype) -> Tensor:
        """Return the next tensor; a new one unless the last snapshot's had this shape and dtype."""
        index, self._taken = self._taken, self._taken + 1
        if index < len(self._tensors) and self._tensors[index].shape == shape and self._tensors[index].dtype == dtype:
            return self._tensors[index]
        del self._tensors[index:]
        self._tensors.append(torch.empty(shape, dtype=dtype))
        return self._tensors[index]


class HostCopies:
    """Host tensors that will be filled with the current values of source tensors."""

    def __init__(self, device: torch.device, memory: HostMemory) -> None:
        """Sources are on `device` or in the host's memory. Copies are in `memory`, which nothing else uses now."""
        memory.begin()
        self._memory = memory
        self._device = device
        self._work: list[Callable[[_Stage], None]] = []
        self._storages: set[int] = set()
        self._filled = threading.Event()
        self._error: Exception | None = None

    def of(self, source: Tensor) -> Tensor:
        """Return a contiguous tensor that will be filled with the values of `source`."""
        target = self._empty(source.shape, source.dtype)
        self._work.append(partial(_copy, target, source.detach()))
        return target

    @contextlib.contextmanager
    def of_optimizers(self, optimizers: list[Any]) -> Iterator[None]:
        """Make Megatron's distributed optimizers return such tensors in the block instead of gathering their state."""
        for one in optimizers:
            one.get_parameter_state_dp_zero = partial(self._state, one)
        try:
            yield
        finally:
            for one in optimizers:
                del one.get_parameter_state_dp_zero

    def owns(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of these or a view of one."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def start(self) -> None:
        """Start to fill the tensors. All ranks call it in their training threads."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies run on another stream
        threading.Thread(target=self._fill, name="copy-checkpoint", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the sources may change, also because copying failed. Returns False after `seconds`."""
        return self._filled.wait(seconds)

    def wait_or_raise(self, seconds: float) -> None:
        """Wait until the sources may change.

        Raises:
            TimeoutError: copying took longer than `seconds`.
        """
        if not self.wait(seconds):
            raise TimeoutError(f"copying the state for a checkpoint took longer than {seconds:g} s")

    def check(self) -> None:
        """Wait for the copies; raise the exception of the copying thread, if any."""
        self._filled.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a new thread starts with device 0
            stage = _Stage(self._device)
            for work in self._work:
                work(stage)
            stage.finish()
        except Exception as error:  # `check` raises it in the thread that needs the copies
            self._error = error
        finally:
            self._work.clear()
            self._filled.set()

    def _empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        target = self._memory.take(torch.Size(shape), dtype)
        self._storages.add(target.untyped_storage().data_ptr())
        return target

    def _state(self, optimizer: Any, use_gloo_comm: bool, empty_data: bool, return_on_all_ranks: bool) -> Any:
        """Replaces `DistributedOptimizer.get_parameter_state_dp_zero`, which copies everything five times."""
        assert use_gloo_comm
        assert not empty_data
        assert not return_on_all_ranks
        group = optimizer.data_parallel_group_gloo
        first = group.rank() == 0
        dtypes = {"param": torch.float32} | dict.fromkeys(MOMENTS, moments_dtype(optimizer.optimizer))
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(optimizer.gbuf_ranges):
            buffer = optimizer.buffers[index]
            ((dtype, buckets),) = ranges.items()
            size = buffer.numel_unpadded
            targets = {key: self._empty((size,), dtypes[key]) for key in STATE} if first else {}
            self._work.append(partial(_gather, optimizer, buffer, buckets, targets, dtypes, group))
            state[index] = {dtype: {**targets, "numel_unpadded": size}}
        return state if first else None


class _Stage:
    """Copies tensors to the host; from a GPU on a separate stream, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []
        self._arriving: tuple[torch.cuda.Event, Tensor, Tensor] | None = None
        """The copy in progress: its event, the pinned buffer, and the target."""
        if self._stream is not None:
            self._free = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy to a host tensor of the same shape; complete after `finish`."""
        if self._stream is None or not source.is_cuda:
            target.copy_(source)
            return
        count = STAGING_BYTES // source.element_size()
        with torch.cuda.stream(self._stream):
            for to, piece in zip(target.view(-1).split(count), source.reshape(-1).split(count), strict=True):
                pinned = self._free.pop()
                pinned[: piece.nbytes].view(piece.dtype).copy_(piece, non_blocking=True)
                arrived = self._stream.record_event()
                self.finish()
                self._arriving = arrived, pinned, to

    def finish(self) -> None:
        """Complete the copy in progress."""
        if self._arriving is None:
            return
        (arrived, pinned, to), self._arriving = self._arriving, None
        arrived.synchronize()
        to.copy_(pinned[: to.nbytes].view(to.dtype))
        self._free.append(pinned)


def _copy(target: Tensor, source: Tensor, stage: _Stage) -> None:
    stage.copy(target, source)


def _gather(
    optimizer: Any,
    buffer: Any,
    buckets: list[Any],
    targets: dict[str, Tensor],
    dtypes: dict[str, torch.dtype],
    group: dist.ProcessGroup,
    stage: _Stage,
) -> None:
    """Gather a buffer's state from all data-parallel ranks into the first one's [numel_unpadded] targets."""
    begin = 0
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        end = begin + bucket.numel_unpadded
        share = bucket.grad_data.numel() // group.size()
        own = {model: optimizer._get_main_param_and_optimizer_states(model) for model in ranges["param_map"]}
        for key in STATE:
            alone = group.size() == 1
            mine = targets[key][begin:end] if alone else torch.zeros(share, dtype=dtypes[key])
            for model, places in ranges["param_map"].items():
                place = places["gbuf_local"]
                stage.copy(mine[place.start : place.end], own[model][key].detach())
            if alone:
                continue
            stage.finish()
            parts = torch.empty(share * group.size(), dtype=dtypes[key]) if targets else None
            received = list(parts.split(share)) if parts is not None else None
            dist.gather(mine, received, dist.get_process_group_ranks(group)[0], group)
            if parts is not None:
                targets[key][begin:end].copy_(parts[: bucket.numel_unpadded])
        begin = end
