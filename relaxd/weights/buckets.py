"""Contents of weight broadcasts: tensors in flat byte buffers (buckets), their layout on the wire, and a checksum that
both ends compare."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from relaxd.engines import ENGINES
from relaxd.v1 import sample_pb2, weights_pb2
from relaxd.weights.weight_group import Transport

ELEMENT_TYPES: dict[torch.dtype, "sample_pb2.ElementType.ValueType"] = {
    torch.uint8: sample_pb2.ELEMENT_TYPE_UINT8,
    torch.int32: sample_pb2.ELEMENT_TYPE_INT32,
    torch.int64: sample_pb2.ELEMENT_TYPE_INT64,
    torch.bfloat16: sample_pb2.ELEMENT_TYPE_BFLOAT16,
    torch.float16: sample_pb2.ELEMENT_TYPE_FLOAT16,
    torch.float32: sample_pb2.ELEMENT_TYPE_FLOAT32,
    torch.float64: sample_pb2.ELEMENT_TYPE_FLOAT64,
}
"""Element types of the gRPC messages, by torch dtype."""

_DTYPES = {element: dtype for dtype, element in ELEMENT_TYPES.items()}


class ManifestError(Exception):
    """A manifest doesn't fit the tensors. The exception's message names the tensor."""


class ManifestMismatch(Exception):
    """Manifest and model differ: a tensor is unknown, is missing or has another shape."""


@dataclass(frozen=True)
class TensorSpec:
    """Name (Hugging Face's), dtype and shape of a tensor as sent."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor as sent, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorBucket:
    """Contents of one flat byte buffer: tensors in order, without padding, sent by one source rank."""

    tensors: tuple[TensorSpec, ...]
    source_rank: int

    @property
    def nbytes(self) -> int:
        """Size of the flat buffer, in bytes."""
        return sum(spec.nbytes for spec in self.tensors)


def plan_buckets(
    specs: Sequence[TensorSpec], bucket_bytes: int, source_rank: int, *, first_alone: bool = False
) -> list[TensorBucket]:
    """Divide tensors, in the given order, into buckets of at most `bucket_bytes`. A larger tensor gets its own bucket.

    With `first_alone` the first tensor also gets its own bucket: NCCL sends nothing before it has enqueued a whole
    bucket, so a small first bucket starts sooner.
    """
    buckets: list[TensorBucket] = []
    current: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if current and ((first_alone and not buckets) or size + spec.nbytes > bucket_bytes):
            buckets.append(TensorBucket(tuple(current), source_rank))
            current, size = [], 0
        current.append(spec)
        size += spec.nbytes
    if current:
        buckets.append(TensorBucket(tuple(current), source_rank))
    return buckets


def tensors_of(bucket: TensorBucket, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield a bucket's tensors without conversion.

    Raises ManifestError for a tensor that is missing or has another shape.
    """
    for spec in bucket.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            raise ManifestError(f"{spec.name} is in the manifest, but there is no such tensor")
        if tuple(tensor.shape) != spec.shape:
            raise ManifestError(f"{spec.name} has shape {tuple(tensor.shape)}; the manifest says {spec.shape}")
        yield spec, tensor


def pack(bucket: TensorBucket, tensors: Mapping[str, torch.Tensor], buffer: torch.Tensor) -> torch.Tensor:
    """Copy a bucket's tensors, converted to their wire types, into a uint8 buffer [>= bucket.nbytes].

    Returns the filled part of the buffer. Raises ManifestError for a tensor that is missing or has another shape.
    """
    offset = 0
    for spec, tensor in tensors_of(bucket, tensors):
        target = buffer[offset : offset + spec.nbytes]
        if offset % spec.dtype.itemsize == 0:
            target.view(spec.dtype).view(spec.shape).copy_(tensor)
        else:  # torch cannot view unaligned bytes, which occur with mixed element types
            target.copy_(tensor.to(spec.dtype).contiguous().view(-1).view(torch.uint8))
        offset += spec.nbytes
    return buffer[:offset]


def unpack(bucket: TensorBucket, buffer: torch.Tensor) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield a bucket's tensors from a filled uint8 buffer, as views (copies if unaligned)."""
    offset = 0
    for spec in bucket.tensors:
        source = buffer[offset : offset + spec.nbytes]
        if offset % spec.dtype.itemsize:
            source = source.clone()
        yield spec, source.view(spec.dtype).view(spec.shape)
        offset += spec.nbytes


def to_proto(buckets: Sequence[TensorBucket]) -> weights_pb2.WeightManifest:
    """Convert buckets to a weight manifest."""
    manifest = weights_pb2.WeightManifest()
    for bucket in buckets:
        message = manifest.buckets.add(source_rank=bucket.source_rank)
        for spec in bucket.tensors:
            message.tensors.add(name=spec.name, dtype=ELEMENT_TYPES[spec.dtype], shape=spec.shape)
    return manifest


def from_proto(manifest: weights_pb2.WeightManifest) -> list[TensorBucket]:
    """Convert a weight manifest to buckets. Raises ManifestError for an unknown element type or a negative size."""
    buckets = []
    for message in manifest.buckets:
        specs = []
        for tensor in message.tensors:
            dtype = _DTYPES.get(tensor.dtype)
            if dtype is None:
                raise ManifestError(f"{tensor.name} has the unknown element type {tensor.dtype}")
            if any(size < 0 for size in tensor.shape):
                raise ManifestError(f"{tensor.name} has the invalid shape {tuple(tensor.shape)}")
            specs.append(TensorSpec(tensor.name, dtype, tuple(tensor.shape)))
        buckets.append(TensorBucket(tuple(specs), message.source_rank))
    return buckets


Layout = Literal["flat", "direct"]
"""Layout of buckets' broadcasts. flat: one broadcast per bucket, of a buffer with its tensors in order (`pack`,
`unpack`). direct: one broadcast per tensor, grouped by bucket, so that both ends can use the models' own memory."""

ALIGNMENT = 256
"""Alignment of the tensors in a buffer for direct broadcasts, in bytes, for speed on GPUs."""


def broadcast_layout(transport: Transport, engine: str) -> Layout:
    """Return the broadcast layout of a transport and engine. All members of a weight group choose the same layout.

    NCCL fuses a group of broadcasts, so it sends each tensor directly. gloo has a cost per operation, and external
    SGLang servers support flat buckets only.
    """
    return "direct" if transport == "nccl" and not ENGINES[engine].stock_weight_group else "flat"


def piece_bytes(bucket: TensorBucket) -> int:
    """Return the size, in bytes, of the buffer that `pieces` needs for a bucket."""
    return sum(-(-spec.nbytes // ALIGNMENT) * ALIGNMENT for spec in bucket.tensors)


def pieces(bucket: TensorBucket, buffer: torch.Tensor) -> list[torch.Tensor]:
    """Divide a uint8 buffer [>= piece_bytes] into one view per tensor of a bucket."""
    views, offset = [], 0
    for spec in bucket.tensors:
        views.append(buffer[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape))
        offset += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return views


def as_sent(bucket: TensorBucket, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return a bucket's tensors, contiguous and with the dtypes of the manifest. Tensors are copied only if needed.

    Raises ManifestError for a tensor that is missing or has another shape.
    """
    return [
        tensor if tensor.dtype == spec.dtype and tensor.is_contiguous() else tensor.to(spec.dtype).contiguous()
        for spec, tensor in tensors_of(bucket, tensors)
    ]


_WIDTH, _MAX_ROWS = 4096, 1 << 22
"""Width and maximum height of the matrix into which a checksum arranges a tensor's 8-byte words: enough for 128 GiB.

The checksum's value doesn't depend on them.
"""


def checksum(tensor: torch.Tensor) -> int:
    """Return an unsigned 64-bit checksum of a tensor's bits.

    It is the sum, modulo 2^64, of all 8-byte words (signed integers, the last padded with zeros), each times 2 i + 1
    for its position i. It detects changed and swapped values, and does not depend on the order of summation, so it is
    the same on any device.
    """
    return int(_total(tensor)) % (1 << 64)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the checksums of several tensors on one device, waiting for the device once."""
    return read_checksums(begin_checksums(tensors))


def begin_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Start computing tensors' checksums. Returns int64 scalars on the tensors' device, for `read_checksums`."""
    return {name: _total(tensor) for name, tensor in tensors.items()}


def read_checksums(begun: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Wait for the checksums that `begin_checksums` started, and return them as unsigned integers."""
    totals = torch.stack(list(begun.values())).tolist() if begun else []
    return {name: total % (1 << 64) for name, total in zip(begun, totals, strict=True)}


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's checksum as an int64 scalar tensor, which wraps around modulo 2^64.

    The 8-byte words form a matrix, whose row and column sums suffice: 2 i + 1 = 2 width row + (2 column + 1).
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
