"""Gradient buffers, and their reduction over the data-parallel ranks."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from services.trainer.model.model import PolicyModel


class DataParallel(DistributedDataParallel):
    """Megatron's gradient buffers, reduced only by `finalize_model_grads`.

    Micro-batches arrive as a stream whose last one isn't known in advance, so reduction can't overlap the backward
    pass. A rank that shares its parameters with no other rank skips reduction and gathering, for which torch would
    copy all gradients and parameters in each step.
    """

    def __init__(self, model: PolicyModel) -> None:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
        )
        super().__init__(config=model.config, ddp_config=settings, module=model)
        self._alone = self.intra_dp_cp_group.size() == 1 and self.intra_expt_dp_group.size() == 1

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sum the gradients over the data-parallel ranks."""
        if not self._alone:
            super().finish_grad_sync(force_all_reduce)

    def start_param_sync(self, *args: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters, of which each data-parallel rank has updated a part."""
        if not self._alone:
            super().start_param_sync(*args, force_sync=force_sync, force_dispatch=force_dispatch)
