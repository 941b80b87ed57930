"""Buckets of weights on the wire: their layout, and the checksum that both sides of a broadcast compare."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import torch

from relaxd.engines import ENGINES
from relaxd.weights.buckets import TensorBucket, tensors_of
from relaxd.weights.weight_group import Transport

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
    return "direct" if transport == "nccl" and not ENGINES[engine].stock_weight_group else "flat"


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


_WIDTH, _MAX_ROWS = 4096, 1 << 22
"""Width, and max height, of the matrix in which words are added up: tensors of at most 128 GiB. No checksum depends on
them."""


def checksum(tensor: torch.Tensor) -> int:
    """Return an unsigned 64-bit checksum of a tensor's bits.

    It is the sum, modulo 2^64, of every 8 bytes (as a signed integer, the last ones filled up with zeros) times the odd
    number 2 i + 1 at position i. It detects changed and swapped values, and does not depend on the order of summation,
    so it is the same on any device.
    """
    return int(_total(tensor)) % (1 << 64)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the checksums of several tensors on one device, with one synchronisation."""
    return read_checksums(begin_checksums(tensors))


def begin_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Enqueue the checksums of tensors. Returns what `read_checksums` reads: int64 [] each, on the tensors' device."""
    return {name: _total(tensor) for name, tensor in tensors.items()}


def read_checksums(begun: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Wait for checksums of tensors on one device, and return them."""
    totals = torch.stack(list(begun.values())).tolist() if begun else []
    return {name: total % (1 << 64) for name, total in zip(begun, totals, strict=True)}


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum as int64 [], whose overflow is the modulo 2^64.

    The words are a matrix, of which sums of rows and columns are enough: 2 i + 1 = 2 width row + (2 column + 1).
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 8 or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8))
    words = data.view(torch.int64)
    odd = _odd_numbers(tensor.device)
    matrix = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rows, columns, rest = matrix.sum(1), matrix.sum(0), words[matrix.numel() :]
    total = (rows * (odd[: len(rows)] - 1)).sum() * _WIDTH + (columns * odd[:_WIDTH]).sum()
    return total + (rest * (odd[: len(rest)] + 2 * matrix.numel())).sum()


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(_MAX_ROWS, dtype=torch.int64, device=device) * 2 + 1
