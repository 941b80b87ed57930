"""Query, key and value heads: split from a common projection, normalised per head, and rotated."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from services.trainer.transformer.kernels import fused_kernels


class Rotary(NamedTuple):
    """Frequencies and scale of a rotary embedding, for one size of head."""

    frequencies: Tensor
    """Angular frequencies in radians per position, float32 [rotated width / 2]."""
    scale: float = 1.0
    """Factor that multiplies cosine and sine (YaRN)."""
    axes: Tensor | None = None
    """Axis of positions for each frequency in M-RoPE (0 time, 1 row, 2 column), int64 of the same length; None if
    positions have one axis."""

    def to(self, device: torch.device) -> "Rotary":
        """Return the rotary embedding with its tensors on a device."""
        axes = None if self.axes is None else self.axes.to(device)
        return Rotary(self.frequencies.to(device), self.scale, axes)


def split_heads(
    qkv: Tensor, norms: tuple[Tensor, Tensor] | None, table: Tensor, head_size: int, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Split a projection into queries, keys and values. Normalise queries and keys per head, and rotate both.

    Args:
        qkv: [T, groups, (queries + 2) x head_size]: each key-value head with its query heads before it.
        norms: weights [head_size] of the queries' and the keys' RMSNorm, if there are any.
        table: `rotary_table` of the tokens' positions, [2, T, 1, head_size / 2]. If it is narrower, only the beginning
            of each head is rotated.
        head_size: width of a head.
        epsilon: epsilon of the norms.

    Returns:
        [T, groups x queries, head_size], [T, groups, head_size] and [T, groups, head_size].
    """
    power_of_two = head_size & (head_size - 1) == 0  # Triton needs it
    whole = 2 * table.shape[-1] == head_size
    if qkv.dtype == torch.bfloat16 and power_of_two and whole and fused_kernels():
        query_weight, key_weight = norms or (None, None)
        fused: tuple[Tensor, Tensor, Tensor] = _Heads.apply(qkv, query_weight, key_weight, table, head_size, epsilon)
        return fused
    tokens, _, width = qkv.shape
    query, key, value = qkv.split([width - 2 * head_size, head_size, head_size], dim=-1)
    query = query.reshape(tokens, -1, head_size)
    if norms is not None:
        query, key = rms_norm(query, norms[0], epsilon), rms_norm(key, norms[1], epsilon)
    table = table.to(qkv.dtype)
    return rotate(query, table), rotate(key, table), value


def split_gates(qkv: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Separate the output gates, each of which follows its query head, from a projection.

    Args:
        qkv: [T, groups, (2 x queries + 2) x head_size].
        head_size: width of a head.

    Returns:
        The rest, [T, groups, (queries + 2) x head_size], and the gates, [T, groups x queries, head_size].
    """
    queries, others = qkv.split([qkv.shape[-1] - 2 * head_size, 2 * head_size], -1)
    query, gate = queries.unflatten(-1, (-1, 2, head_size)).unbind(-2)
    return torch.cat((query.flatten(2), others), -1), gate.flatten(1, 2)


def rms_norm(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Compute the RMSNorm of x [..., size], times `scale` [size], which may have a more precise dtype."""
    if scale.dtype == x.dtype:
        return functional.rms_norm(x, scale.shape, scale, epsilon)
    return functional.rms_norm(x.to(scale.dtype), scale.shape, scale, epsilon).to(x.dtype)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        table: Tensor,
        head_size: int,
        epsilon: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from services.trainer.transformer.kernels.layer_kernels import heads_forward

        ctx.save_for_backward(qkv, query_weight, key_weight, table)
        ctx.head_size, ctx.epsilon = head_size, epsilon
        norms = None if query_weight is None or key_weight is None else (query_weight, key_weight)
        return heads_forward(qkv.flatten(1).contiguous(), norms, table, qkv.shape[1], head_size, epsilon)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from services.trainer.transformer.kernels.layer_kernels import heads_backward

        qkv, query_weight, key_weight, table = ctx.saved_tensors
        norms = None if query_weight is None else (query_weight, key_weight)
        flat = qkv.flatten(1).contiguous()
        arguments = (flat, norms, table, qkv.shape[1], ctx.head_size, ctx.epsilon)
        grad_qkv, grad_query_weight, grad_key_weight = heads_backward(*arguments, (grads[0], grads[1], grads[2]))
        return grad_qkv.view(qkv.shape), grad_query_weight, grad_key_weight, None, None, None


def rotary_table(positions: Tensor, rotary: Rotary) -> Tensor:
    """Compute cosine and sine of every token's rotary angles, times the embedding's scale.

    Args:
        positions: int64 [T], each token's position in its sequence; or float32 [3, T], by time, row and column.
        rotary: the rotary embedding, on the same device; with axes for positions [3, T].

    Returns:
        float32 [2, T, 1, number of frequencies].
    """
    if positions.dim() == 1:
        angles = torch.outer(positions.float(), rotary.frequencies).unsqueeze(1)
    else:
        angles = (positions[rotary.axes].T * rotary.frequencies).unsqueeze(1)
    return torch.stack((angles.cos(), angles.sin())) * rotary.scale


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate x [T, heads, head_size] by the angles of a rotary table (Hugging Face's "rotate half" convention).

    A narrower table rotates only the beginning of each head.
    """
    cos, sin = table[0], table[1]
    half = table.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
