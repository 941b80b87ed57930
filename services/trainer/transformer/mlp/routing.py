"""Routing of tokens to experts: inputs and output of the routers, rows of tokens sorted by expert, and their exchange
with the ranks that have the experts.

There is a row for each token and expert. Nothing here synchronizes with the device, except where it says so: the number
of rows is known, and their assignment stays on the device.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.transformer.kernels.fusion import fused_kernels


@dataclass(frozen=True)
class RouterInputs:
    """Inputs of the routers for one micro-batch."""

    weight: float = 0.0
    """Total weight of the micro-batch's tokens in the step's loss. It scales the routers' own losses, so that they are
    averaged over a step like the tokens' loss."""
    experts: Tensor | None = None
    """int16 [layers of this stage, T, top_k], T being this rank's tokens: experts that were chosen before, for routers
    that replay them (`Router.replays`). Where they are negative the router chooses. The weights are always its own."""


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
        """Copy."""
        ctx.save_for_backward(places)
        return copy_to_rows(x, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Add up."""
        return sum_of_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


class SumOfRows(torch.autograd.Function):
    """`sum_of_rows` for autograd."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor) -> Tensor:
        """Add up."""
        ctx.save_for_backward(places)
        return sum_of_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Copy."""
        return copy_to_rows(grads[0].contiguous(), ctx.saved_tensors[0]), None


def _fused(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_cuda and fused_kernels()


class ExpertExchange:
    """The exchange of one layer's rows with their experts' ranks.

    torch's all-to-all needs the sizes on the host, so the host waits for the device once per layer, in `to_experts`.
    Kernels enqueued between the constructor and that call overlap the wait.
    """

    def __init__(self, ends: Tensor, group: dist.ProcessGroup) -> None:
        """Exchange row counts with the other ranks.

        Args:
            ends: int32 [experts], the end of each expert's rows on this rank.
            group: the ranks that share the experts.
        """
        self._group = group
        self._here = len(ends) // group.size()
        counts = ends.diff(prepend=ends.new_zeros(1)).contiguous()
        mine, theirs = counts, torch.empty_like(counts)
        dist.all_to_all_single(theirs, mine, group=group)  # by rank, the rows for this rank's experts
        self._received = theirs.view(group.size(), self._here)
        sizes = torch.stack((mine.view(self._received.shape).sum(1), self._received.sum(1)))
        self._sizes = _copy_to_host(sizes) if sizes.is_cuda else sizes
        self._ready = torch.cuda.current_stream().record_event() if sizes.is_cuda else None
        self._splits: tuple[list[int], list[int]] | None = None

    def to_experts(self, rows: Tensor) -> Tensor:
        """Send rows [R, width], sorted by expert; return the rows for this rank's experts, by source rank."""
        sent, received = self._wait_for_sizes()
        arrived: Tensor = _AllToAll.apply(rows, sent, received, self._group)
        return arrived

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Send the experts' outputs back to the rows' ranks; return this rank's rows, sorted by expert."""
        sent, received = self._wait_for_sizes()
        arrived: Tensor = _AllToAll.apply(rows, received, sent, self._group)
        return arrived

    def sort(self) -> tuple[Tensor, Tensor]:
        """Return places [R, 1] that sort the received rows by expert, and the experts' ends; see `sort_by_expert`."""
        experts = torch.arange(self._here, device=self._received.device).repeat(self._group.size())
        each = experts.repeat_interleave(self._received.flatten(), output_size=sum(self._wait_for_sizes()[1]))
        return sort_by_expert(each.unsqueeze(1), self._here)

    def _wait_for_sizes(self) -> tuple[list[int], list[int]]:
        """Return the numbers of rows sent to and received from each rank."""
        if self._splits is None:
            if self._ready is not None:
                self._ready.synchronize()
            sent, received = self._sizes.tolist()
            self._splits = sent, received
        return self._splits


def _copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy to pinned host memory on the current stream."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
