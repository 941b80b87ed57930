"""Receipts for weights: digests by which engines report the weights that generated a sample.

The digest of a version covers the names of all tensors that a broadcast sends and, by the tensors' checksums
(relaxd.weights.buckets), every bit of their values. It doesn't cover tensors that aren't sent, such as those of a
frozen tower. The trainer computes checksums of the tensors that it sends; the engine computes them of the memory from
which it generates.
"""

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

from relaxd.v1.sample_pb2 import WeightReceipt

DIGITS = 16
"""Number of hexadecimal digits of a weight digest."""


class Receipt(NamedTuple):
    """An engine's statement about the weights with which it generated tokens of a sample."""

    version: int
    digest: str
    """Digest of the engine's weights of this version, computed from its memory; "": unknown."""
    engine: str
    """Id of the engine's replica."""

    @classmethod
    def from_proto(cls, message: WeightReceipt) -> "Receipt":
        """Convert a WeightReceipt message to a receipt."""
        return cls(message.version, message.digest, message.engine)

    def to_proto(self) -> WeightReceipt:
        """Convert the receipt to a WeightReceipt message."""
        return WeightReceipt(version=self.version, digest=self.digest, engine=self.engine)


def digest_of(checksums: Mapping[str, int]) -> str:
    """Return the digest of weights, given the checksum of each tensor by name; "" without checksums.

    The digest is the beginning of the SHA-256 of lines "name checksum", sorted by name.
    """
    lines = "".join(f"{name} {value}\n" for name, value in sorted(checksums.items()))
    return sha256(lines.encode()).hexdigest()[:DIGITS] if lines else ""
