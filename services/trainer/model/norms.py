"""RMSNorm (arXiv 1910.07467), alone and fused with the preceding residual sum."""

from typing import Any

import services.trainer.megatron.cpu  # noqa: F401  must come before Megatron

# isort: split
import torch
import torch.nn.functional as functional
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from services.trainer.transformer.kernels.fusion import fused_kernels


class RMSNorm(torch.nn.Module):
    """Root mean square normalisation, compatible with Megatron's sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object) -> None:
        super().__init__()
        self.eps = eps
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., hidden_size]."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def of_sum(self, x: Tensor, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the new residual x + addend (x without addend) and its norm.

        Fused kernels need one pass over memory forward and one backward, which includes the residual's gradient.
        """
        if x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels():
            fused: tuple[Tensor, Tensor] = _NormOfSum.apply(x, addend, self.weight, self.eps)
            return fused
        total = x if addend is None else x + addend
        return total, self(total)


class _NormOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, addend: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        from services.trainer.transformer.kernels.norm_kernels import norm_forward

        x = x.contiguous()
        total, output, inverses = norm_forward(x, None if addend is None else addend.contiguous(), weight, epsilon)
        ctx.save_for_backward(total, weight, inverses)
        ctx.adds = addend is not None
        return total.view_as(total) if addend is None else total, output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from services.trainer.transformer.kernels.norm_kernels import norm_backward

        grad, grad_weight = norm_backward(*ctx.saved_tensors, *grads)
        return grad, grad if ctx.adds else None, grad_weight, None
