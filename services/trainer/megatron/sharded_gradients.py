"""Sharded gradients: between micro-batches, each data-parallel rank keeps only its shard.

ZeRO (arXiv 1910.02054), section 5.2: the second stage, which DeepSpeed calls stage 2, torch's FSDP SHARD_GRAD_OP, and
Megatron-FSDP optim_grads. Megatron-FSDP isn't used, because it replaces Megatron's buffers and distributed optimizer:
checkpoints, moments in low precision and worlds on CPU are built on these. Here the buckets, the shards and the
optimizer stay Megatron's; this module only manages the gradients' memory.

A bucket has memory for all of its gradients only within a backward pass: from the first added gradient until all are
complete and their sum over ranks is scattered. Each rank then adds its shard of the sum, in float32, to its shard from
earlier micro-batches. As in FSDP, memory is freed and allocated by resizing a storage, so that all
views of it stay valid.
"""

from collections.abc import Callable, Mapping
from typing import Any

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode


class WithoutGradientMemory(TorchFunctionMode):
    """Torch mode that keeps Megatron from allocating its gradient buffers. `ShardedGradients` allocates them later."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function. Every second `torch.zeros`, Megatron's for gradients, allocates only one number."""
        if func is torch.zeros:
            self._calls += 1
            if self._calls % 2 == 0:
                (count,) = args
                return torch.zeros((), **kwargs).expand(count)
        return func(*args, **(kwargs or {}))


class ShardedGradients:
    """Manages a model's gradients in place of Megatron's gradient buffers.

    Buckets are reduced in a fixed order in each backward pass, so that all ranks call the same collectives even if
    their gradients come in another order or are missing. A parameter gets one gradient in each backward pass, or none
    if the loss doesn't depend on it: buckets that are incomplete after a pass are reduced when the next one begins.
    """

    def __init__(self, model: DistributedDataParallel, *, overlap: bool) -> None:
        """Replace the model's gradient buffers.

        Args:
            model: made within `WithoutGradientMemory`, with the setting overlap_grad_reduce.
            overlap: True if a bucket is reduced while gradients of the next bucket are computed.
        """
        self._overlap = overlap
        found: list[GradientBucket] = []
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            assert (buffer.grad_data.stride(), buffer.param_data.stride()) == ((0,), (1,)), "another Megatron's buffers"
            starts = {parameter: start for parameter, (start, _, _) in buffer.param_index_map.items()}
            for bucket in buffer.buckets:
                group = model.param_to_bucket_group[bucket.params_list[0]]
                assert group.buckets == [bucket]
                found.append(GradientBucket(group, starts))
            buffer.grad_data = torch.empty(0, device=buffer.param_data.device)
        places = {parameter: place for place, parameter in enumerate(model.module.parameters())}
        # A backward pass comes to the first parameters last. Experts have separate buckets.
        self.buckets = sorted(found, key=lambda one: -min(places[parameter] for parameter in one.parameters))
        self._bucket_of = {parameter: index for index, one in enumerate(self.buckets) for parameter in one.parameters}
        self._passes = 0
        """Number of backward passes whose gradients still have to be reduced."""
        self._counted: set[Parameter] = set()
        """Parameters that have received their gradient in the current backward pass."""
        self._lacking: list[int] = []
        """By bucket, the number of parameters that still lack a gradient in the current backward pass."""
        self._next = 0
        """Index of the next gradient bucket to reduce."""
        self._under_way: GradientBucket | None = None
        self._reduced = False
        self.started_early = self.started_late = 0
        """Numbers of gradient buckets reduced as soon as complete, and of those reduced by a later pass or `end`."""
        self._begin_pass()
        self.reset()

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's gradient shards, float32, one per bucket: its only gradients between micro-batches."""
        return [bucket.shard for bucket in self.buckets]

    def begin(self, micro_batches: int) -> None:
        """Prepare for the backward passes of `micro_batches` micro-batches, the same number on all ranks.

        Raises:
            RuntimeError: the gradients are in use already.
        """
        if self._reduced:
            raise RuntimeError("micro-batches come after the last ones of an update, whose gradients are reduced")
        self._passes = micro_batches
        self.started_early = self.started_late = 0

    def count(self, parameter: Parameter) -> None:
        """Note that a parameter has its gradient of a micro-batch. Reduce buckets that are complete.

        Raises:
            RuntimeError: the parameter got more gradients than there are micro-batches.
        """
        if parameter in self._counted:  # another parameter got no gradient in the previous pass
            self._end_pass()
        if not self._passes:
            raise RuntimeError(
                "a parameter got several gradients in one backward pass, perhaps after they were reduced: set "
                "trainer.shard_gradients = false for this model"
            )
        self._counted.add(parameter)
        self._lacking[self._bucket_of[parameter]] -= 1
        while self._next < len(self.buckets) and not self._lacking[self._next]:
            self._reduce()
            self.started_early += 1
        if self._next == len(self.buckets):
            self._end_pass()

    def end(self) -> None:
        """Reduce the remaining gradient buckets of all backward passes. Then only shards have memory."""
        while self._passes:
            self._end_pass()
        self._finish()

    def show(self) -> None:
        """Set each parameter's `main_grad` to its slice of this rank's gradient shard: float32 [n], may be empty."""
        self.end()
        self._reduced = True
        for bucket in self.buckets:
            bucket.show()

    def scale(self, factor: float) -> None:
        """Multiply this rank's gradient shards by `factor`."""
        for bucket in self.buckets:
            bucket.shard.mul_(factor)

    def reset(self) -> None:
        """Zero the gradients for the next optimizer update."""
        self._finish()
        self._passes, self._reduced = 0, False
        self._begin_pass()
        for bucket in self.buckets:
            bucket.reset()

    def _begin_pass(self) -> None:
        self._counted.clear()
        self._lacking = [len(bucket.parameters) for bucket in self.buckets]
        self._next = 0

    def _end_pass(self) -> None:
        while self._next < len(self.buckets):
            self._reduce()
            self.started_late += 1
        self._passes -= 1
        self._begin_pass()

    def _reduce(self) -> None:
        self._finish()
        self._under_way = self.buckets[self._next]
        self._under_way.start()
        self._next += 1
        if not self._overlap:
            self._finish()

    def _finish(self) -> None:
        bucket, self._under_way = self._under_way, None
        if bucket is not None:
            bucket.finish()


class GradientBucket:
    """A bucket: parameters whose gradients are reduced in one collective.

    If no other rank has the same parameters (experts with a single copy), nothing is reduced: the shard has all
    gradients, which keep their memory.
    """

    def __init__(self, group: Any, starts: Mapping[Parameter, int]) -> None:
        """Create the bucket's gradients and this rank's shard of them.

        Args:
            group: Megatron's bucket group, with one bucket.
            starts: first element of each parameter in the bucket's buffer.
        """
        (bucket,) = group.buckets
        self._group = group
        group.is_first_batch = False  # there is nothing to learn
        self.parameters: list[Parameter] = bucket.params_list
        ranks, rank = (
            group.intra_distributed_optimizer_instance_size,
            group.intra_distributed_optimizer_instance_rank,
        )
        device, count = bucket.param_data.device, bucket.grad_data.numel()
        self.whole = torch.empty(count, dtype=torch.float32, device=device)
        """All gradients of the bucket, float32 [n]; without memory between backward passes."""
        share, self._divided = count // ranks, ranks > 1
        self.shard = torch.zeros(share, dtype=torch.float32, device=device) if self._divided else self.whole
        """This rank's shard of the bucket's gradients, float32 [n / ranks], summed over ranks and micro-batches."""
        bucket.grad_data = self.whole
        self._own = self.whole[rank * share : (rank + 1) * share]
        self._views = {}
        self._shown = {}
        self._finished = True
        for parameter in self.parameters:
            begin = starts[parameter] - bucket.offset
            view = self.whole[begin : begin + parameter.numel()].view(parameter.shape)
            view.provide = self.provide  # type: ignore[attr-defined]  # see `writable`
            self._views[parameter] = view
            first = begin - rank * share
            self._shown[parameter] = slice(max(first, 0), max(first + parameter.numel(), 0))
        self._release()

    def provide(self) -> None:
        """Allocate the bucket's gradients, filled with zeros, unless they have memory."""
        self.finish()
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.whole.nbytes)
            self.whole.zero_()

    def start(self) -> None:
        """Start to sum the bucket's gradients of a backward pass over ranks."""
        if self._divided:
            self.provide()  # without any gradient there is no memory yet
            self._group.start_grad_sync()
            self._finished = False

    def finish(self) -> None:
        """Wait for the sum over ranks, if one was started. Add this rank's slice of it to the shard."""
        if not self._finished:
            self._finished = True
            self._group.finish_grad_sync()
            self.shard.add_(self._own)
            self._release()

    def show(self) -> None:
        for parameter, part in self._shown.items():
            parameter.main_grad = self.shard[part]

    def reset(self) -> None:
        """Zero the shard, free the whole gradients' memory, and make each `main_grad` a view of them again."""
        self._release()
        self.shard.zero_()
        for parameter, view in self._views.items():
            parameter.main_grad = view

    def _release(self) -> None:
        if self._divided:
            self.whole.untyped_storage().resize_(0)


def use_shards(optimizer: Any) -> Callable[[], None]:
    """Return a hook that feeds ready gradients to one of Megatron's distributed optimizers.

    It replaces Megatron's method that reads whole gradients (`_copy_model_grads_to_main_grads`).
    """

    def give() -> None:
        decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        low = optimizer.shard_float16_groups if decoupled else optimizer.shard_fp32_from_float16_groups
        of_model = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        for parameters, shards in zip(of_model, [*low, *optimizer.shard_fp32_groups], strict=True):
            for parameter, shard in zip(parameters, shards, strict=True):
                assert parameter.main_grad.shape == shard.shape
                setattr(shard, "decoupled_grad" if decoupled else "grad", parameter.main_grad)

    return give
