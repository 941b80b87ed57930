"""Gradient buffers, and their reduction over the data-parallel ranks."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from services.trainer.model.model import PolicyModel


class DataParallel(DistributedDataParallel):
    """Megatron's buffers for summed gradients. Nothing is reduced before `finalize_model_grads` asks for it.

    Micro-batches come as a stream and nobody knows which is the last, so that reduction can't overlap the backward
    pass. A rank that shares its parameters with no other one has nothing to reduce or gather; torch would copy all
    gradients and all parameters once each step to find that out.
    """

    def __init__(self, model: PolicyModel) -> None:
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=True
        )
        super().__init__(config=model.config, ddp_config=settings, module=model)
        self._alone = self.intra_dp_cp_group.size() == 1 and self.intra_expt_dp_group.size() == 1

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Add the gradients up over the data-parallel ranks."""
        if not self._alone:
            super().finish_grad_sync(force_all_reduce)

    def start_param_sync(self, *args: object, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Gather the parameters that each data-parallel rank has updated a part of."""
        if not self._alone:
            super().start_param_sync(*args, force_sync=force_sync, force_dispatch=force_dispatch)
