"""Causal attention by cuDNN on packed sequences of any lengths, through NVIDIA's Python frontend.

One call computes many sequences: cuDNN reads their offsets and lengths on the device. Building a plan is slow and each
shape of call needs one, so counts are rounded up to a few sizes by adding empty sequences. Import only on a machine
with a GPU; `attention_kernels` finds out whether it works there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cudnn  # type: ignore[import-not-found, unused-ignore]
import torch
from torch import Tensor

from services.trainer.transformer.sequence_layout import CudnnBatch, rounded_up

_BFLOAT16, _FLOAT, _INT32, _INT64 = (getattr(cudnn.data_type, name) for name in ("BFLOAT16", "FLOAT", "INT32", "INT64"))


MAX_STATISTICS_RATIO = 4
"""Maximum memory of softmax statistics padded to the longest sequence, as a multiple of packed. Beyond it they are
packed, which makes the backward pass slower by up to a tenth."""


def cudnn_attention(
    query: Tensor, key: Tensor, value: Tensor, batches: Sequence[CudnnBatch], scale: float, window: int | None = None
) -> Tensor:
    """Compute causal attention within each sequence.

    Args:
        query: bfloat16 [T, heads, size], contiguous.
        key: bfloat16 [T, kv_heads, size], contiguous; kv_heads divide heads.
        value: like `key`.
        batches: the sequences, one call each; together they cover all tokens.
        scale: factor of the scores.
        window: tokens that a token attends to, itself included; None for all before it.

    Returns:
        [T, heads, size].
    """
    output: Tensor = _Attention.apply(query, key, value, batches, scale, window)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batches: Sequence[CudnnBatch],
        scale: float,
        window: int | None,
    ) -> Tensor:
        output = torch.empty_like(query)
        tensors, statistics = {"q": query, "k": key, "v": value, "o": output}, []
        for batch in batches:
            shape = _Shape.of(query, key, batch, scale, window)
            size = (len(query), shape.heads) if shape.packed else (batch.count, shape.heads, batch.longest)
            statistics.append(torch.empty(size, dtype=torch.float32, device=query.device))
            _execute(_forward_plan(shape), {**tensors, "stats": statistics[-1], **_offsets(batch, shape)})
        ctx.save_for_backward(query, key, value, output, *statistics)
        ctx.batches, ctx.scale, ctx.window = batches, scale, window
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, *statistics = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (query, key, value)]
        tensors = {"q": query, "k": key, "v": value, "o": output, "do": grads[0].contiguous()}
        tensors |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        for batch, logsumexp in zip(ctx.batches, statistics, strict=True):
            shape = _Shape.of(query, key, batch, ctx.scale, ctx.window)
            _execute(_backward_plan(shape), {**tensors, "stats": logsumexp, **_offsets(batch, shape)})
        return *gradients, None, None, None


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Shapes and options of a cuDNN call. Calls of the same shape share a plan."""

    device: int
    count: int
    longest: int
    tokens: int  # all tokens, rounded up: size of the backward pass's accumulators
    heads: int
    kv_heads: int
    size: int
    scale: float
    window: int | None
    packed: bool  # whether statistics are packed

    @classmethod
    def of(cls, query: Tensor, key: Tensor, batch: CudnnBatch, scale: float, window: int | None) -> "_Shape":
        tokens = max(rounded_up(len(query), 4), 1024)
        index, (_, heads, size) = query.device.index or 0, query.shape
        packed = batch.count * batch.longest > MAX_STATISTICS_RATIO * tokens
        if window is not None and window >= batch.longest:
            window = None
        return cls(
            device=index,
            count=batch.count,
            longest=batch.longest,
            tokens=tokens,
            heads=heads,
            kv_heads=key.shape[1],
            size=size,
            scale=scale,
            window=window,
            packed=packed,
        )


@dataclass(frozen=True)
class _Plan:
    graph: Any
    tensors: dict[str, Any]
    workspace: int


def _offsets(batch: CudnnBatch, shape: _Shape) -> dict[str, Tensor]:
    return {
        "lengths": batch.lengths,
        "in_queries": batch.begins * (shape.heads * shape.size),
        "in_keys": batch.begins * (shape.kv_heads * shape.size),
        "in_stats": batch.begins * shape.heads,
    }


@lru_cache(maxsize=8)
def _handle(device: int) -> Any:
    with torch.cuda.device(device):
        return cudnn.create_handle()


def _execute(plan: _Plan, tensors: dict[str, Tensor]) -> None:
    device = next(iter(tensors.values())).device
    handle = _handle(device.index or 0)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    workspace = torch.empty(max(plan.workspace, 1), dtype=torch.uint8, device=device)
    pointers = {tensor: tensors[name].data_ptr() for name, tensor in plan.tensors.items()}
    plan.graph.execute(pointers, workspace.data_ptr(), handle=handle)


class _Builder:
    """Builds the cuDNN graph of a forward or backward pass."""

    def __init__(self, shape: _Shape) -> None:
        self.shape = shape
        self.graph = cudnn.pygraph(
            io_data_type=_BFLOAT16,
            intermediate_data_type=_FLOAT,
            compute_data_type=_FLOAT,
            handle=_handle(shape.device),
        )
        ends = [shape.count + 1, 1, 1, 1]
        self.tensors: dict[str, Any] = {
            "lengths": self._tensor("lengths", [shape.count, 1, 1, 1], _INT32),
            "in_queries": self._tensor("in_queries", ends, _INT64),
            "in_keys": self._tensor("in_keys", ends, _INT64),
        }
        if shape.packed:
            self.tensors["in_stats"] = self._tensor("in_stats", ends, _INT64)

    def _tensor(self, name: str, dim: list[int], kind: Any) -> Any:
        return self.graph.tensor(name=name, dim=dim, stride=[math.prod(dim[i + 1 :]) for i in range(4)], data_type=kind)

    def add_heads(self, name: str, *, like: str) -> None:
        """Add an input tensor [T, heads, size] to the graph. cuDNN sees it as [sequences, heads, longest, size]."""
        dim, stride, offsets = self.geometry(like)
        self.tensors[name] = self.graph.tensor(
            name=name, dim=dim, stride=stride, data_type=_BFLOAT16, ragged_offset=offsets
        )

    def add_statistics(self, tensor: Any = None) -> None:
        """Add the softmax's log-sum-exp, float32, to the graph: as output `tensor` if given, otherwise as input."""
        shape = self.shape
        dim = [shape.count, shape.heads, shape.longest, 1]
        stride = [shape.heads * shape.longest, shape.longest, 1, 1]
        if shape.packed:
            stride = [shape.heads * shape.longest, 1, shape.heads, 1]
        if tensor is None:
            tensor = self.graph.tensor(name="stats", dim=dim, stride=stride, data_type=_FLOAT)
        else:
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(_FLOAT)
        if shape.packed:
            tensor.set_ragged_offset(self.tensors["in_stats"])
        self.tensors["stats"] = tensor

    def geometry(self, like: str) -> tuple[list[int], list[int], Any]:
        """Return dimensions, strides and ragged offsets of a tensor `like` "queries" or "keys"."""
        shape = self.shape
        heads = shape.heads if like == "queries" else shape.kv_heads
        dim = [shape.count, heads, shape.longest, shape.size]
        return dim, [shape.longest * heads * shape.size, shape.size, heads * shape.size, 1], self.tensors[f"in_{like}"]

    def set_output(self, name: str, tensor: Any, *, like: str) -> None:
        """Make `tensor` an output of the graph, with the layout of "queries" or "keys"."""
        dim, stride, offsets = self.geometry(like)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(_BFLOAT16).set_ragged_offset(offsets)
        self.tensors[name] = tensor

    def masks(self) -> dict[str, Any]:
        """Return cuDNN's arguments for the scale and for a causal mask within sequences and window."""
        window = {} if self.shape.window is None else {"diagonal_band_left_bound": self.shape.window}
        return {
            "attn_scale": self.shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self.tensors["lengths"],
            "seq_len_kv": self.tensors["lengths"],
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
            **window,
        }

    def build(self) -> _Plan:
        """Build the execution plan of the graph."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.graph.check_support()
        self.graph.build_plans()
        return _Plan(self.graph, self.tensors, self.graph.get_workspace_size())


@lru_cache(maxsize=256)
def _forward_plan(shape: _Shape) -> _Plan:
    builder = _Builder(shape)
    builder.add_heads("q", like="queries")
    builder.add_heads("k", like="keys")
    builder.add_heads("v", like="keys")
    q, k, v = (builder.tensors[name] for name in "qkv")
    output, statistics = builder.graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=True, **builder.masks())
    builder.set_output("o", output, like="queries")
    builder.add_statistics(statistics)
    return builder.build()


@lru_cache(maxsize=256)
def _backward_plan(shape: _Shape) -> _Plan:
    builder = _Builder(shape)
    for name in ("q", "o", "do"):
        builder.add_heads(name, like="queries")
    for name in ("k", "v"):
        builder.add_heads(name, like="keys")
    builder.add_statistics()
    q, k, v, o, do, stats = (builder.tensors[name] for name in ("q", "k", "v", "o", "do", "stats"))
    gradients = builder.graph.sdpa_backward(
        name="sdpa_backward", q=q, k=k, v=v, o=o, dO=do, stats=stats,
        max_total_seq_len_q=shape.tokens, max_total_seq_len_kv=shape.tokens, **builder.masks(),
    )  # fmt: skip
    for name, gradient, like in zip(("dq", "dk", "dv"), gradients, ("queries", "keys", "keys"), strict=True):
        builder.set_output(name, gradient, like=like)
    return builder.build()
