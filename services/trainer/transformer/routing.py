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
    """Inputs of the routers for one micro-batch."""

    weight: float = 0.0
    """Total weight of the micro-batch's tokens in the step's loss. It scales the routers' own losses, so that they are
    averaged over a step like the tokens' loss."""
    experts: Tensor | None = None
    """int16 [layers of this stage, T, top_k], T being this rank's tokens: experts chosen earlier, for routers that
    replay them (`Router.replays`). Where they are negative, the router chooses. It always computes the weights."""


@dataclass(frozen=True)
class Routing:
    """Experts and weights of a layer's tokens."""

    experts: Tensor
    """int64 [T, top_k]."""
    weights: Tensor
    """float32 [T, top_k], differentiable."""


def sort_by_expert(experts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Assign a row to each copy of a token: an expert's rows are consecutive and in the tokens' order.

    Args:
        experts: int64 [T, K], the experts of each token.
        count: number of experts.

    Returns:
        int64 [T, K], the rows of each token's copies; int32 [count], the end of each expert's rows.
    """
    found, order = experts.flatten().to(torch.int16 if count < 1 << 15 else torch.int32).sort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    numbers = torch.arange(count, device=order.device, dtype=found.dtype)
    return places.view(experts.shape), torch.searchsorted(found, numbers, right=True, out_int32=True)


def copy_to_rows(x: Tensor, places: Tensor) -> Tensor:
    """Copy each token to its rows.

    Args:
        x: [T, width].
        places: int64 [T, K], a permutation of the rows.

    Returns:
        [T x K, width].
    """
    if _fused(x):
        from services.trainer.transformer.kernels import expert_kernels

        return expert_kernels.copy_to_rows(x, places)
    rows = x.new_empty(places.numel(), x.shape[1])
    rows[places.flatten()] = x.repeat_interleave(places.shape[1], 0)
    return rows


def sum_of_rows(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token in float32, always in the same order.

    Args:
        rows: [T x K, width].
        places: int64 [T, K], a permutation of the rows.

    Returns:
        [T, width].
    """
    if _fused(rows):
        from services.trainer.transformer.kernels import expert_kernels

        return expert_kernels.sum_of_rows(rows, places)
    return rows[places].float().sum(1).to(rows.dtype)


class CopyToRows(torch.autograd.Function):
    """`copy_to_rows` for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        """Copy each token to its rows."""
        ctx.save_for_backward(places)
        return copy_to_rows(x, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the gradients of each token's rows."""
        return sum_of_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


class SumOfRows(torch.autograd.Function):
    """`sum_of_rows` for autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        """Sum the rows of each token."""
        ctx.save_for_backward(places)
        return sum_of_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Copy each token's gradient to its rows."""
        return copy_to_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels()
