"""Slots: the places of a packed micro-batch's tokens in the order that attention needs, and moving tokens there.

Attention needs every sequence whole, so a shared prompt is repeated in front of each response, and some kernels need
padding. A *slot* is a place among these *scattered* tokens.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.transformer.kernels.fusion import fused_kernels


@dataclass(frozen=True)
class Slots:
    """P slots of T tokens."""

    token_of_slot: Tensor
    """int64 [P]: the token in each slot."""
    slot_of_token: Tensor
    """int64 [T]: first slot of each token with a slot."""
    order: Tensor
    """int64 [P]: all slots of the first token, then of the second ..."""
    order_begin: Tensor
    """int64 [T + 1]: where each token's slots begin in `order`, and P."""

    @classmethod
    def of(cls, token_of_slot: NDArray[np.int64], tokens: int, device: torch.device) -> "Slots":
        """Make slots from the token in each slot, for a row of `tokens` tokens."""
        slot_of_token = np.zeros(tokens, np.int64)
        slot_of_token[token_of_slot[::-1]] = np.arange(len(token_of_slot))[::-1]  # the last write wins: the first slot
        return cls(
            to_device(token_of_slot, device),
            to_device(slot_of_token, device),
            to_device(np.argsort(token_of_slot, kind="stable"), device),
            to_device(np.cumsum([0, *np.bincount(token_of_slot, minlength=tokens)]), device),
        )


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Convert a numpy array to a tensor on `device`; a copy to a GPU is asynchronous."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def scatter_to_sequences(x: Tensor, slots: Slots, *, sum_copies: bool) -> Tensor:
    """Copy packed tokens to their slots: [T, ...] -> [P, ...].

    Args:
        x: the packed tokens.
        slots: the slots.
        sum_copies: sum the gradients of all copies of a token; otherwise only the first slot's gradient is used.
    """
    scattered: Tensor = _Scatter.apply(x, slots, sum_copies)
    return scattered


def gather_from_sequences(x: Tensor, slots: Slots) -> Tensor:
    """Copy tokens from their first slots back to the packed order: [P, ...] -> [T, ...]."""
    gathered: Tensor = _Gather.apply(x, slots)
    return gathered


class _Scatter(torch.autograd.Function):
    """x[token_of_slot], with a lookup as backward pass where possible.

    Padding comes last in its sequence and attention is causal, so padding has no gradient. Only tokens that are in
    several sequences have gradients to sum.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots, sum_copies: bool) -> Tensor:
        ctx.slots, ctx.sum_copies, ctx.shape = slots, sum_copies, x.shape
        return x.flatten(1).index_select(0, slots.token_of_slot).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        slots: Slots = ctx.slots
        grad = grads[0].flatten(1)
        if ctx.sum_copies and grad.dtype == torch.bfloat16 and fused_kernels():
            from services.trainer.transformer.kernels.layer_kernels import sum_copies

            total = sum_copies(grad.contiguous(), slots.order, slots.order_begin)
        elif ctx.sum_copies:
            total = grad.new_zeros(ctx.shape[0], grad.shape[1]).index_add_(0, slots.token_of_slot, grad)
        else:
            total = grad.index_select(0, slots.slot_of_token)
        return total.view(ctx.shape), None, None


class _Gather(torch.autograd.Function):
    """x[slot_of_token]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Slots) -> Tensor:
        ctx.slots, ctx.shape = slots, x.shape
        return x.flatten(1).index_select(0, slots.slot_of_token).view(-1, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].flatten(1)
        return grad.new_zeros(ctx.shape[0], grad.shape[1]).index_copy_(0, ctx.slots.slot_of_token, grad).view(
            ctx.shape
        ), None
