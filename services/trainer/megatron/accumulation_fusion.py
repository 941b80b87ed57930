"""Megatron's gradient accumulation fusion, implemented with torch instead of apex."""

import services.trainer.megatron.cpu_support  # noqa: F401  must come before Megatron

# isort: split
from typing import Any

import megatron.core.tensor_parallel.layers as layers
from torch import Tensor

from services.trainer.megatron.gradient_accumulation import add_product_, writable


class _MatrixProducts:
    """Replaces apex's extension, which Megatron calls to add products to its gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """Add grad_output [tokens, out].T @ total_input [tokens, in] to main_grad [out, in]."""
        add_product_(writable(main_grad), grad_output, total_input)


def install() -> None:
    """Make Megatron's option gradient_accumulation_fusion work without apex."""
    bare_layers: Any = layers
    bare_layers.fused_weight_gradient_mlp_cuda = _MatrixProducts
    bare_layers._grad_accum_fusion_available = True
