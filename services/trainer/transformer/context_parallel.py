"""Context parallelism: each rank has a slice of the micro-batch's tokens, whatever sequences they belong to.

As in DeepSpeed-Ulysses (arXiv 2309.14509), ranks exchange tokens for heads before attention, and back after it. A rank
then has all tokens of some query heads; ranks that have heads of the same key-value head each get a copy of it. If
heads don't divide evenly among all ranks, only groups of neighbours exchange them. Each group then has the queries of
some tokens with all heads, and gathers keys and values from all groups.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from relaxd.models.layouts import ContextDivision


@dataclass(frozen=True)
class ContextRanks:
    """Process groups of the ranks with which this rank shares attention."""

    exchanging: dist.ProcessGroup | None = None
    """Neighbouring ranks that exchange tokens for heads; None if there is nothing to exchange."""
    gathering: dist.ProcessGroup | None = None
    """Ranks with the same heads in all groups of neighbours, in order of tokens; None if this rank has all tokens."""
    copies: int = 1
    """Number of exchanging ranks with the same key-value head."""


def context_ranks(context: dist.ProcessGroup, division: ContextDivision, timeout: timedelta) -> ContextRanks:
    """Create the process groups that share attention, and return those of this rank. Collective over the world.

    Args:
        context: the context-parallel ranks.
        division: how these ranks share attention.
        timeout: deadline of each collective.
    """
    if division.gathering == 1:
        return ContextRanks(context if division.exchanging > 1 else None, None, division.copies)
    if division.exchanging == 1:
        return ContextRanks(None, context)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = torch.tensor(dist.get_process_group_ranks(context), device=device)
    everyone = own.new_empty(dist.get_world_size() * len(own))
    dist.all_gather_into_tensor(everyone, own)
    rank, width = dist.get_rank(), division.exchanging
    exchanging = gathering = None
    for ranks in sorted({tuple(ranks) for ranks in everyone.view(-1, len(own)).tolist()}):
        for neighbours in (ranks[begin : begin + width] for begin in range(0, len(ranks), width)):
            group = dist.new_group(neighbours, timeout=timeout)
            exchanging = group if rank in neighbours else exchanging
        for alike in (ranks[begin::width] for begin in range(width)):
            group = dist.new_group(alike, timeout=timeout)
            gathering = group if rank in alike else gathering
    return ContextRanks(exchanging, gathering, division.copies)


def copy_kv_heads(qkv: Tensor, copies: int, head_size: int) -> Tensor:
    """Divide the query heads of each key-value head into parts, each with a copy of the key-value head.

    Args:
        qkv: [T, kv_heads, (queries + 2) x head_size].
        copies: number of parts.
        head_size: width of a head.

    Returns:
        [T, kv_heads x copies, (queries / copies + 2) x head_size].
    """
    if copies == 1:
        return qkv
    queries, keys_and_values = qkv.split([qkv.shape[-1] - 2 * head_size, 2 * head_size], -1)
    queries = queries.unflatten(-1, (copies, -1))
    copied = keys_and_values.unsqueeze(2).expand(-1, -1, copies, -1)
    return torch.cat((queries, copied), -1).flatten(1, 2)


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the tokens of all ranks: [T / ranks, ...] -> [T, ...]. The backward pass sums all ranks' gradients."""
    gathered: Tensor = _Gather.apply(x, group)
    return gathered


def tokens_to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's tokens for its heads: [T / ranks, heads, ...] -> [T, heads / ranks, ...]."""
    exchanged: Tensor = _Exchange.apply(x, group, True)
    return exchanged


def heads_to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange this rank's heads for its tokens: [T, heads / ranks, ...] -> [T / ranks, heads, ...]."""
    exchanged: Tensor = _Exchange.apply(x, group, False)
    return exchanged


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        own = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(own, grad, group=ctx.group)
        return own, None


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
