"""Buckets, manifests, checksums and digests."""

from hashlib import sha256

import numpy as np
import pytest
import torch

from relaxd.weights.buckets import (
    ManifestError,
    TensorBucket,
    TensorSpec,
    as_sent,
    broadcast_layout,
    checksum,
    checksums,
    from_proto,
    pack,
    piece_bytes,
    pieces,
    plan_buckets,
    to_proto,
    unpack,
)
from relaxd.weights.nccl import NcclError, check_environment
from relaxd.weights.receipts import Receipt, digest_of

SPECS = [
    TensorSpec("a", torch.float32, (3, 5)),
    TensorSpec("b", torch.bfloat16, (7,)),
    TensorSpec("c", torch.uint8, (3,)),
    TensorSpec("d", torch.float32, (2, 2)),  # not aligned: 60 + 14 + 3 bytes come before it
    TensorSpec("e", torch.int64, ()),
]


def values() -> dict[str, torch.Tensor]:
    return {spec.name: (torch.randn(spec.shape) * 50).abs().to(spec.dtype) for spec in SPECS}


@pytest.mark.parametrize("bucket_bytes", [1, 64, 80, 1 << 20])
@pytest.mark.parametrize("first_alone", [False, True])
def test_unpacked_tensors_equal_the_packed_ones_bit_for_bit(bucket_bytes: int, first_alone: bool) -> None:
    tensors = values()
    buckets = plan_buckets(SPECS, bucket_bytes, source_rank=1, first_alone=first_alone)
    if bucket_bytes == 1 << 20:
        assert [len(bucket.tensors) for bucket in buckets] == ([1, len(SPECS) - 1] if first_alone else [len(SPECS)])
    received = {}
    for bucket in buckets:
        assert bucket.source_rank == 1
        assert bucket.nbytes <= bucket_bytes or len(bucket.tensors) == 1
        buffer = torch.zeros(4096, dtype=torch.uint8)
        flat = pack(bucket, tensors, buffer)
        assert flat.numel() == bucket.nbytes
        received |= {spec.name: tensor for spec, tensor in unpack(bucket, flat)}
    assert list(received) == [spec.name for spec in SPECS]
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor)


def test_packing_converts_to_the_wire_type() -> None:
    bucket = TensorBucket((TensorSpec("w", torch.bfloat16, (4,)),), 0)
    flat = pack(bucket, {"w": torch.tensor([1.0, 2.0, 3.14159, -0.5])}, torch.zeros(8, dtype=torch.uint8))
    ((_, tensor),) = unpack(bucket, flat)
    assert torch.equal(tensor, torch.tensor([1.0, 2.0, 3.14159, -0.5]).bfloat16())


def test_manifests_survive_the_wire() -> None:
    buckets = plan_buckets(SPECS, 64, source_rank=0)
    assert from_proto(to_proto(buckets)) == buckets


def test_a_mismatch_names_the_tensor() -> None:
    bucket = TensorBucket((TensorSpec("model.norm.weight", torch.float32, (4,)),), 0)
    buffer = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ManifestError, match=r"model\.norm\.weight is in the manifest"):
        pack(bucket, {}, buffer)
    with pytest.raises(ManifestError, match=r"model\.norm\.weight has shape \(5,\); the manifest says \(4,\)"):
        pack(bucket, {"model.norm.weight": torch.zeros(5)}, buffer)
    manifest = to_proto([bucket])
    manifest.buckets[0].tensors[0].dtype = 99  # type: ignore[assignment]
    with pytest.raises(ManifestError, match="unknown element type 99"):
        from_proto(manifest)


def formula(tensor: torch.Tensor) -> int:
    """The checksum as it is documented."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    data += b"\0" * (-len(data) % 8)
    words = np.frombuffer(data, np.uint64)
    with np.errstate(over="ignore"):
        return int((words * (2 * np.arange(len(words), dtype=np.uint64) + np.uint64(1))).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_the_checksum_is_its_formula_and_sees_every_change(dtype: torch.dtype) -> None:
    tensor = (torch.randn(1000) * 50).abs().to(dtype).view(10, 100)
    assert checksum(tensor) == formula(tensor)
    changed = tensor.clone()
    changed[3, 7] += 1
    assert checksum(changed) != checksum(tensor)
    swapped = tensor.clone()
    swapped.view(-1)[[0, -1]] = torch.tensor([5, 90]).to(dtype)
    crossed = tensor.clone()
    crossed.view(-1)[[0, -1]] = torch.tensor([90, 5]).to(dtype)
    assert checksum(swapped) != checksum(crossed)


@pytest.mark.parametrize("size", [0, 1, 8191, 8192, 8193, (1 << 20) + 17])
def test_the_checksum_of_a_large_tensor_does_not_depend_on_its_pieces(size: int) -> None:
    tensor = torch.randn(size)
    assert checksum(tensor) == formula(tensor)
    assert checksums({"a": tensor, "b": tensor[:5]}) == {"a": formula(tensor), "b": formula(tensor[:5])}
    assert checksum(tensor[1:]) == formula(tensor[1:].clone()), "wherever it begins in memory"
    assert checksums({}) == {}


def test_tensors_travel_from_where_they_are_if_they_can() -> None:
    tensors = values()
    bucket = TensorBucket(tuple(SPECS), 0)
    sent = dict(zip(tensors, as_sent(bucket, tensors), strict=True))
    assert all(sent[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())
    turned = {**tensors, "a": tensors["a"].t().contiguous().t().double()}
    (first, *_) = as_sent(bucket, turned)
    assert first.is_contiguous()
    assert torch.equal(first, tensors["a"])
    for spec, piece in zip(SPECS, pieces(bucket, torch.empty(piece_bytes(bucket), dtype=torch.uint8)), strict=True):
        assert (piece.dtype, tuple(piece.shape)) == (spec.dtype, spec.shape)
        piece.copy_(tensors[spec.name])
        assert torch.equal(piece, tensors[spec.name])
    with pytest.raises(ManifestError, match="a has shape"):
        as_sent(bucket, {**tensors, "a": torch.zeros(2)})


def test_the_layout_follows_from_transport_and_engine() -> None:
    assert broadcast_layout("nccl", "sglang") == "direct"
    assert broadcast_layout("nccl", "sglang_external") == "flat"
    assert broadcast_layout("gloo", "sglang") == broadcast_layout("gloo", "transformers") == "flat"


def test_nccl_is_refused_if_members_would_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    check_environment()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    with pytest.raises(NcclError, match="NCCL_CUMEM_ENABLE is 1 in this process: it must be 0 in every member"):
        check_environment()


def test_a_digest_is_of_names_and_checksums_in_any_order() -> None:
    digest = digest_of({"a": 1, "b": 2})
    assert digest == digest_of({"b": 2, "a": 1}) == sha256(b"a 1\nb 2\n").hexdigest()[:16]
    others = [{"a": 2, "b": 1}, {"a": 1}, {"a": 1, "b": 2, "c": 0}, {"a": 1, "c": 2}]
    assert len({digest, *map(digest_of, others)}) == 5
    assert digest_of({}) == "", "unknown"
    receipt = Receipt(3, digest, "rollout-0")
    assert Receipt.from_proto(receipt.to_proto()) == receipt
