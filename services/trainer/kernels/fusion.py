"""Whether our fused GPU kernels can be used here, found out once by running one."""

import logging
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def fused_kernels() -> bool:
    """Whether Triton can build and run kernels on this machine's GPU; logs once what is used.

    Triton comes with torch's CUDA wheels, but needs a C compiler when it runs. Without it everything works with
    torch's own operations, more slowly.
    """
    if not torch.cuda.is_available():
        return False
    try:
        from services.trainer.kernels.layer_kernels import swiglu_forward

        swiglu_forward(torch.ones(1, 32, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("training without fused kernels, which costs a fifth of its speed: Triton fails: %r", error)
        return False
    logger.info("training with fused kernels")
    return True
