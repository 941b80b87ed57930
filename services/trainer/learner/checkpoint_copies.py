"""Copies of a learner's state in the host's memory, made beside the next step's forward and backward pass.

Weights and optimizer state change in the optimizer step and nowhere else. So a snapshot needs no copies at once: it
gets tensors that nothing has been written to, plans its files with these, and a thread fills them before the next
optimizer step begins, which waits for it.
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

STATE = ("param", "exp_avg", "exp_avg_sq")
"""What the distributed optimizer has of each parameter."""
STAGED_BYTES = 32 << 20
"""A GPU's tensors come through two pieces of pinned memory of this size: one is filled by the GPU while the host's
threads empty the other one."""


class HostCopies:
    """Tensors in the host's memory that will have the values that others have now."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the others may be, besides the host's memory."""
        self._device = device
        self._work: list[Callable[[_Stage], None]] = []
        self._storages: set[int] = set()
        self._filled = threading.Event()
        self._error: Exception | None = None

    def of(self, source: Tensor) -> Tensor:
        """A contiguous tensor that will have a tensor's values."""
        target = self._empty(source.shape, source.dtype)
        self._work.append(partial(_copy, target, source.detach()))
        return target

    @contextlib.contextmanager
    def of_optimizers(self, optimizers: list[Any]) -> Iterator[None]:
        """Inside, Megatron's distributed optimizers give such tensors where they would gather and copy their state."""
        for one in optimizers:
            one.get_parameter_state_dp_zero = partial(self._state, one)
        try:
            yield
        finally:
            for one in optimizers:
                del one.get_parameter_state_dp_zero

    def owns(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of these, or a part of one."""
        return tensor.untyped_storage().data_ptr() in self._storages

    def start(self) -> None:
        """Begin to fill the tensors; on all ranks, in the thread that trains."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies aren't ordered with what was enqueued before
        threading.Thread(target=self._fill, name="copy-checkpoint", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until the others may change; returns whether they may. They also may where copying has failed."""
        return self._filled.wait(seconds)

    def let_go(self, seconds: float) -> None:
        """Wait until the others may change.

        Raises:
            TimeoutError: that took longer.
        """
        if not self.wait(seconds):
            raise TimeoutError(f"a checkpoint's copies were not made within {seconds:g} s")

    def check(self) -> None:
        """Wait for the copies, and raise what copying raised."""
        self._filled.wait()
        if self._error is not None:
            raise self._error

    def _fill(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first one
            stage = _Stage(self._device)
            for work in self._work:
                work(stage)
            stage.finish()
        except Exception as error:  # raised again by `check`, in the thread that needs the copies
            self._error = error
        finally:
            self._work.clear()
            self._filled.set()

    def _empty(self, shape: Any, dtype: torch.dtype) -> Tensor:
        target = torch.empty(shape, dtype=dtype)
        self._storages.add(target.untyped_storage().data_ptr())
        return target

    def _state(self, optimizer: Any, use_gloo_comm: bool, empty_data: bool, return_on_all_ranks: bool) -> Any:
        """Stands in for `DistributedOptimizer.get_parameter_state_dp_zero`, which copies everything five times over."""
        assert use_gloo_comm
        assert not empty_data
        assert not return_on_all_ranks
        group = optimizer.data_parallel_group_gloo
        first = group.rank() == 0
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for index, ranges in enumerate(optimizer.gbuf_ranges):
            buffer = optimizer.buffers[index]
            ((dtype, buckets),) = ranges.items()
            size = buffer.numel_unpadded
            targets = {key: self._empty((size,), torch.float32) for key in STATE} if first else {}
            self._work.append(partial(_gather, optimizer, buffer, buckets, targets, group))
            state[index] = {dtype: {**targets, "numel_unpadded": size}}
        return state if first else None


class _Stage:
    """Copies to the host: from a GPU on a stream of its own, through pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: list[Tensor] = []
        self._arriving: tuple[torch.cuda.Event, Tensor, Tensor] | None = None
        """What the GPU copies now: its end, the pinned memory, and where the host copies it from there."""
        if self._stream is not None:
            self._free = [torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a tensor to one of its shape in the host's memory; done after `finish`."""
        if self._stream is None or not source.is_cuda:
            target.copy_(source)
            return
        count = STAGED_BYTES // source.element_size()
        with torch.cuda.stream(self._stream):
            for to, piece in zip(target.view(-1).split(count), source.reshape(-1).split(count), strict=True):
                pinned = self._free.pop()
                pinned[: piece.nbytes].view(piece.dtype).copy_(piece, non_blocking=True)
                arrived = self._stream.record_event()
                self.finish()
                self._arriving = arrived, pinned, to

    def finish(self) -> None:
        """Complete what has begun."""
        if self._arriving is None:
            return
        (arrived, pinned, to), self._arriving = self._arriving, None
        arrived.synchronize()
        to.copy_(pinned[: to.nbytes].view(to.dtype))
        self._free.append(pinned)


def _copy(target: Tensor, source: Tensor, stage: _Stage) -> None:
    stage.copy(target, source)


def _gather(
    optimizer: Any, buffer: Any, buckets: list[Any], targets: dict[str, Tensor], group: dist.ProcessGroup, stage: _Stage
) -> None:
    """Fill float32 [numel_unpadded] targets on the first data-parallel rank with what all of them have of a buffer."""
    begin = 0
    for bucket, ranges in zip(buffer.buckets, buckets, strict=True):
        end = begin + bucket.numel_unpadded
        share = bucket.grad_data.numel() // group.size()
        own = {model: optimizer._get_main_param_and_optimizer_states(model) for model in ranges["param_map"]}
        for key in STATE:
            alone = group.size() == 1
            mine = targets[key][begin:end] if alone else torch.zeros(share)
            for model, places in ranges["param_map"].items():
                place = places["gbuf_local"]
                stage.copy(mine[place.start : place.end], own[model][key].detach())
            if alone:
                continue
            stage.finish()
            parts = torch.empty(share * group.size()) if targets else None
            received = list(parts.split(share)) if parts is not None else None
            dist.gather(mine, received, dist.get_process_group_ranks(group)[0], group)
            if parts is not None:
                targets[key][begin:end].copy_(parts[: bucket.numel_unpadded])
        begin = end
