"""Routing of tokens to experts: inputs and output of the routers, and rows of tokens sorted by expert.

There is a row for each token and expert. Nothing here synchronizes with the device: the number of rows is known, and
their assignment stays on the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.trainer.transformer.kernels import fused_kernels


@dataclass(frozen=True)
class RouterInputs:
    """Inputs of the routers for one micro-batch, besides its tokens."""

    weight: float = 0.0
    """Total weight of the micro-batch's tokens in the step's loss. The routers' own losses are multiplied by it, and so
    averaged over the step."""
    experts: Tensor | None = None
    """Experts to use for this rank's T tokens, int16 [layers of this stage, T, top_k], in routers with
    `Router.replays`. Where negative, the router chooses. Weights are always the router's."""


@dataclass(frozen=True)
class Routing:
    """Chosen experts of a layer's tokens, and the experts' weights."""

    experts: Tensor
    """Chosen experts of each token, int64 [T, top_k]."""
    weights: Tensor
    """Weights of the chosen experts, float32 [T, top_k], differentiable."""


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Assign a row to each pair of token and expert. An expert's rows are consecutive, in the order of tokens.

    Args:
        experts: int64 [T, K], the experts of each token.
        count: number of experts.

    Returns:
        The rows of each token, int64 [T, K], and the end of each expert's rows, int32 [count].
    """
    found, order = experts.flatten().to(torch.int16 if count < 1 << 15 else torch.int32).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(count, device=order.device, dtype=found.dtype)
    return places.view(experts.shape), torch.searchsorted(found, numbers, right=True, out_int32=True)


def copy_to_rows(x: Tensor, places: Tensor) -> Tensor:
    """Copy each token to the rows of its experts.

    Args:
        x: tokens, [T, width].
        places: int64 [T, K], a permutation of the rows.

    Returns:
        Rows, [T x K, width].
    """
    if _fused(x):
        from services.trainer.transformer.kernels import expert_kernels

        return expert_kernels.copy_to_rows(x, places)
    rows = x.new_empty(places.numel(), x.shape[1])
    rows[places.flatten()] = x.repeat_interleave(places.shape[1], 0)
    return rows


def sum_of_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token's experts, in float32 and always in the same order.

    Args:
        rows: experts' rows, [T x K, width].
        places: int64 [T, K], a permutation of the rows.

    Returns:
        Tokens, [T, width].
    """
    if _fused(rows):
        from services.trainer.transformer.kernels import expert_kernels

        return expert_kernels.sum_of_rows(rows, places)
    return rows[places].float().sum(1).to(rows.dtype)


class CopyToRows(torch.autograd.Function):
    """Autograd function of `copy_to_rows`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        """Copy each token to the rows of its experts."""
        ctx.save_for_backward(places)
        return copy_to_rows(x, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of each token's rows."""
        return sum_of_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


class SumOfRows(torch.autograd.Function):
    """Autograd function of `sum_of_rows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        """Sum the rows of each token's experts."""
        ctx.save_for_backward(places)
        return sum_of_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Copy each token's gradient to the rows of its experts."""
        return copy_to_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels()
