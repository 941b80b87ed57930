"""GPU kernels in Triton, and the autograd functions around them.

Each has an equivalent in plain torch for machines on which Triton doesn't run.
"""

import logging
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def fused_kernels() -> bool:
    """Return True if Triton can build and run kernels on this machine's GPU. Try once, and log the result.

    Triton comes with torch's CUDA wheels, but needs a C compiler at run time. Without it training uses torch's own
    operations, which are slower.
    """
    if not torch.cuda.is_available():
        return False
    try:
        from services.trainer.transformer.kernels.layer_kernels import swiglu_forward

        swiglu_forward(torch.ones(1, 32, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
    except (ImportError, OSError, RuntimeError) as error:
        logger.warning("training without fused kernels, at about four fifths of the speed: Triton fails: %r", error)
        return False
    logger.info("training with fused kernels")
    return True
