"""Layouts of buckets on the wire."""

from collections.abc import Mapping
from typing import Literal

import torch

from relaxd.weights.group import Transport
from relaxd.weights.manifest import TensorBucket, tensors_of

Layout = Literal["flat", "direct"]
"""flat: one broadcast per bucket, of a buffer with its tensors in order (`pack`, `unpack`).
direct: one broadcast per tensor, grouped by bucket, so that both ends can use the models' own memory."""

ALIGNMENT = 256
"""Alignment in bytes of pieces of a buffer for direct broadcasts, for speed on GPUs."""


def broadcast_layout(transport: Transport, engine: str) -> Layout:
    """Return the layout for a transport and engine; all members of a group choose the same one.

    NCCL fuses a group of broadcasts, so it sends each tensor directly. gloo has a cost per operation, and external
    SGLang servers support flat buckets only.
    """
    return "direct" if transport == "nccl" and engine != "sglang_external" else "flat"


def piece_bytes(bucket: TensorBucket) -> int:
    """Return the size of a buffer for `pieces`."""
    return sum(-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in bucket.tensors)


def pieces(bucket: TensorBucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Divide a uint8 buffer [>= piece_bytes] into one view per tensor of a bucket."""
    views, offset = [], 0
    for spec in bucket.tensors:
        views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def as_sent(bucket: TensorBucket, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return a bucket's tensors contiguous and in their wire types; copies only if needed.

    Raises ManifestError for a tensor that is missing or of another shape.
    """
    return [
        tensor if tensor.dtype == spec.dtype and tensor.is_contiguous() else tensor.to(spec.dtype).contiguous()
        for spec, tensor in tensors_of(bucket, tensors)
    ]
