"""Context parallelism as in DeepSpeed-Ulysses (arXiv 2309.14509).

Each rank has a slice of the micro-batch's tokens. Before attention, ranks exchange tokens for heads, so that each
has all tokens of some heads and attends over whole sequences, however packed; after attention, they exchange back.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def tokens_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tokens for its heads: [T / ranks, heads, ...] -> [T, heads / ranks, ...]."""
    exchanged: Tensor = _Exchange.apply(x, group, True)
    return exchanged


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's heads for its tokens: [T, heads / ranks, ...] -> [T / ranks, heads, ...]."""
    exchanged: Tensor = _Exchange.apply(x, group, False)
    return exchanged


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
        ctx.group, ctx.to_heads = group, to_heads
        return _exchange(x, group, to_heads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _exchange(grads[0], ctx.group, not ctx.to_heads), None, None


def _exchange(x: Tensor, group: dist.ProcessGroup, to_heads: bool) -> Tensor:
    ranks, rest = group.size(), x.shape[2:]
    if to_heads:
        mine = x.view(x.shape[0], ranks, -1, *rest).transpose(0, 1).contiguous()
    else:
        mine = x.contiguous().view(ranks, -1, *x.shape[1:])
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=group)
    if to_heads:
        return theirs.flatten(0, 1)
    return theirs.transpose(0, 1).flatten(1, 2)
