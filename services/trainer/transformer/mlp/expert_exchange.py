"""Expert parallelism: all-to-all exchange of rows with the ranks that have their experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.transformer.mlp.expert_rows import sort_by_expert


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
