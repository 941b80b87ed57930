"""Gradient buffers, and their reduction over the data-parallel ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import Tensor
from torch.nn import Parameter

from services.trainer.megatron.gradient_accumulation import writable
from services.trainer.megatron.sharded_gradients import ShardedGradients, WithoutGradientMemory
from services.trainer.model.policy_model import StageModel

BUCKET_PARAMETERS: int | None = None
"""Number of parameters per gradient bucket; a bucket's gradients are reduced together while others are computed. None
for Megatron's default: 40 million for up to 40 ranks."""


class DataParallel(DistributedDataParallel):
    """Megatron's gradient buffers.

    `finalize_model_grads` reduces the gradients. With `overlap`, the backward pass of an update's last micro-batch,
    which the caller announces (`accumulating`), already reduces complete buckets. With `shard`, each backward pass
    reduces the gradients, and a rank keeps only its shard of the sums. A rank that shares its parameters with no other
    rank skips reduction and gathering, in which torch would copy all gradients and parameters.
    """

    def __init__(self, model: StageModel, *, overlap: bool = False, shard: bool = False) -> None:
        self._alone = (
            parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
            and parallel_state.get_expert_data_parallel_world_size() == 1
        )
        overlap, self._shard = overlap and not self._alone, shard and not self._alone
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=overlap or self._shard,
            bucket_size=BUCKET_PARAMETERS,
            use_distributed_optimizer=True,
        )
        with WithoutGradientMemory() if self._shard else nullcontext():
            super().__init__(config=model.config, ddp_config=settings, module=model)
        self.sharded = ShardedGradients(self, overlap=overlap) if self._shard else None
        """Gradients of which each rank holds a shard; None if gradients aren't sharded."""
        self.overlapped = OverlappedReduction(self) if overlap and self.sharded is None else None
        """Reduction of gradients during the backward pass of an update's last micro-batch; None if disabled."""

    @property
    def bucket_size(self) -> int | None:
        """Number of parameters per gradient bucket; None for a single bucket."""
        return self._bucket_size

    @bucket_size.setter
    def bucket_size(self, size: int | None) -> None:
        # Later stages of a pipeline would have a single bucket, which would be as large as all of their gradients.
        if size is not None or not self._shard:
            self._bucket_size = size

    @property
    def gradient_tensors(self) -> list[Tensor]:
        """Tensors that hold the accumulated gradients between micro-batches."""
        if self.sharded is not None:
            return self.sharded.tensors
        return [buffer.grad_data for buffer in [*self.buffers, *self.expert_parallel_buffers]]

    @contextmanager
    def accumulating(self, micro_batches: int, *, last: bool) -> Iterator[None]:
        """Context for the forward and backward passes of micro-batches.

        Args:
            micro_batches: number of micro-batches.
            last: whether the gradients are used next, without further micro-batches; the same on all ranks.

        Raises:
            RuntimeError: micro-batches follow the last ones of an update.
        """
        if self.sharded is not None:
            self.sharded.begin(micro_batches)
        elif self.overlapped is not None:
            self.overlapped.begin(micro_batches, last=last)
        yield
        if self.sharded is not None:
            self.sharded.end()
        elif self.overlapped is not None and last:
            self.overlapped.start_all()

    def wait_for_reduction(self) -> None:
        """Wait until all started reductions have stopped writing to the gradient buffers."""
        if self.overlapped is not None:
            self.overlapped.finish()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel ranks."""
        if self.sharded is not None:
            self.sharded.show()
        elif self.overlapped is not None:
            self.overlapped.start_all()
            self.overlapped.finish()
        elif not self._alone:
            super().finish_grad_sync(force_all_reduce)

    def zero_grad_buffer(self) -> None:
        """Discard all gradients, whether reduced or not."""
        if self.overlapped is not None:
            self.overlapped.reset()
        super().zero_grad_buffer()
        if self.sharded is not None:
            self.sharded.reset()

    def scale_gradients(self, scaling_factor: float) -> None:
        """Multiply all gradients by `scaling_factor`."""
        super().scale_gradients(scaling_factor)
        if self.sharded is not None:
            self.sharded.scale(scaling_factor)

    def start_param_sync(self, *args: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters on every data-parallel rank; each rank has updated a part of the parameters."""
        if not self._alone:
            super().start_param_sync(*args, force_sync=force_sync, force_dispatch=force_dispatch)

    def _make_backward_post_hook(self, param: Parameter) -> Callable[..., None]:
        """Return the function that autograd calls once per backward pass when a parameter's gradient is ready."""
        if not self.ddp_config.overlap_grad_reduce:
            hook: Callable[..., None] = super()._make_backward_post_hook(param)
            return hook

        def accumulate(*unused: object) -> None:
            # Like Megatron's hook, but `param.grad` may be None, because the gradient already went to the buffer.
            added: bool = param.grad_added_to_main_grad and not getattr(param, "zero_out_wgrad", False)  # type: ignore[attr-defined]
            if param.grad is not None and not added:
                writable(param.main_grad).add_(param.grad.data)  # type: ignore[attr-defined]
            param.grad = None
            reduction = self.sharded or self.overlapped
            assert reduction is not None
            reduction.count(param)

        return accumulate


class OverlappedReduction:
    """Starts to reduce each bucket once its parameters have their gradients of all micro-batches.

    Megatron's own bookkeeping learns from the first update how often each parameter gets a gradient, starts a bucket at
    that count, and fails if a micro-batch has another count. Here a parameter gets one gradient in each backward pass,
    or none if the loss doesn't depend on it: buckets that are incomplete after the last pass are started then. Buckets
    start in a fixed order, so that all ranks call the same collectives even if their gradients come in another order or
    are missing.
    """

    def __init__(self, model: DataParallel) -> None:
        """Take over from Megatron the reduction of the gradient buckets of `model`."""
        places = {parameter: place for place, parameter in enumerate(model.module.parameters())}
        groups = [*model.bucket_groups, *model.expert_parallel_bucket_groups]
        # A backward pass reaches the first parameters last. Experts have separate buckets.
        self._groups = sorted(groups, key=lambda group: -min(places[parameter] for parameter in group.params))
        for group in self._groups:
            group.is_first_batch = False  # there is nothing to learn
        self._group_of = {parameter: index for index, group in enumerate(self._groups) for parameter in group.params}
        self._left: dict[Parameter, int] = {}
        """Number of gradients that each parameter still expects; empty until an update's last micro-batches begin."""
        self._lacking: list[int] = []
        """For each bucket the number of parameters that still expect gradients."""
        self._started = self._waited = 0
        """Number of buckets whose reduction has started, and number of buckets for which `finish` has waited."""
        self.started_early = 0
        """Number of buckets whose reduction started before the last update's backward passes ended."""

    def begin(self, micro_batches: int, *, last: bool) -> None:
        if self._left or self._started:
            raise RuntimeError("micro-batches come after the last ones of an update, whose gradients are reduced")
        if last:
            self._left = dict.fromkeys(self._group_of, micro_batches)
            self._lacking = [len(group.params) for group in self._groups]
            self.started_early = 0

    def count(self, parameter: Parameter) -> None:
        """Count a gradient of a parameter, and start to reduce buckets whose gradients are complete.

        Raises:
            RuntimeError: the parameter got more gradients than there are micro-batches.
        """
        if not self._left:
            return
        self._left[parameter] -= 1
        if self._left[parameter] < 0:
            raise RuntimeError(
                "a parameter got several gradients in one backward pass, perhaps after they were reduced: set "
                "trainer.overlap_grad_reduce = false for this model"
            )
        if self._left[parameter] == 0:
            self._lacking[self._group_of[parameter]] -= 1
            while self._started < len(self._groups) and not self._lacking[self._started]:
                self._start()
                self.started_early += 1

    def start_all(self) -> None:
        """Start to reduce all buckets that are not being reduced yet."""
        while self._started < len(self._groups):
            self._start()

    def finish(self) -> None:
        """Wait for the started reductions. On a GPU, the current stream waits, not the host."""
        while self._waited < self._started:
            self._groups[self._waited].finish_grad_sync()
            self._waited += 1

    def reset(self) -> None:
        """Wait for started reductions, and prepare for a new update."""
        self.finish()
        self._left, self._started, self._waited = {}, 0, 0

    def _start(self) -> None:
        self._groups[self._started].start_grad_sync()
        self._started += 1
