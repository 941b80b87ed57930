"""How the tensors of a bucket travel."""

from collections.abc import Mapping
from typing import Literal

import torch

from relaxd.weights.group import Transport
from relaxd.weights.manifest import Bucket, tensors_of

Layout = Literal["flat", "direct"]
"""flat: one broadcast per bucket, of a buffer that holds its tensors one after the other (`pack`, `unpack`).
direct: one broadcast per tensor, those of a bucket as one group, so that both ends may use the models' own memory."""

ALIGNMENT = 256
"""Pieces of a buffer for direct broadcasts begin at multiples of this many bytes, where GPUs are fastest."""


def broadcast_layout(transport: Transport, engine: str) -> Layout:
    """The layout between a trainer and engines of a kind; all members of a group come to the same one.

    NCCL runs a group of broadcasts as one, so it sends tensor by tensor. gloo pays for every operation, and SGLang
    servers that are not ours know flat buckets only.
    """
    return "direct" if transport == "nccl" and engine != "sglang_external" else "flat"


def piece_bytes(bucket: Bucket) -> int:
    """Bytes of a buffer that `pieces` can divide among the bucket's tensors."""
    return sum(-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in bucket.tensors)


def pieces(bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """A view of a uint8 buffer [>= piece_bytes] for each tensor of a bucket."""
    views, offset = [], 0
    for spec in bucket.tensors:
        views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def as_sent(bucket: Bucket, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """A bucket's tensors as they travel: contiguous and of their wire types, where they are if they are that already.

    Raises ManifestError where a tensor is missing or of another shape.
    """
    return [tensor.to(spec.dtype).contiguous() for spec, tensor in tensors_of(bucket, tensors)]
