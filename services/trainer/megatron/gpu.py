"""Fusions that Megatron has options for but leaves to apex and Transformer Engine, with what torch and Triton offer."""

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
from typing import Any

import megatron.core.tensor_parallel.layers as layers
import megatron.core.transformer.mlp as mlp
from torch import Tensor

from services.trainer.kernels.gradients import add_product_
from services.trainer.kernels.swiglu import swiglu


class _MatrixProducts:
    """Stands in for apex's extension, which Megatron asks for products that are added to its gradient buffers."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        """main_grad [out, in] += grad_output [tokens, out].T @ total_input [tokens, in]."""
        add_product_(main_grad, grad_output, total_input)


def _swiglu(x: Tensor, bias: None, *_: object) -> Tensor:
    return swiglu(x)


def _weighted_swiglu(x: Tensor, bias: None, weights: Tensor, *_: object) -> Tensor:
    return (swiglu(x) * weights).to(x.dtype)


def install() -> None:
    """Make Megatron's options gradient_accumulation_fusion and bias_activation_fusion (SwiGLU) work on a bare GPU."""
    bare_layers: Any = layers
    bare_layers.fused_weight_gradient_mlp_cuda = _MatrixProducts
    bare_layers._grad_accum_fusion_available = True
    bare_mlp: Any = mlp
    bare_mlp.bias_swiglu_impl = _swiglu
    bare_mlp.weighted_bias_swiglu_impl = _weighted_swiglu
