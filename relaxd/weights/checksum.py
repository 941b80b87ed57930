"""Checksum of tensors, to compare the two sides of a broadcast."""

from collections.abc import Mapping
from functools import cache

import torch

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """Return an unsigned 64-bit checksum of a tensor's bits.

    It is the sum, modulo 2^64, of every element's bits (as a signed integer) times the odd number 2 i + 1 at position
    i. It detects changed and swapped elements, and does not depend on the order of summation, so it is the same on any
    device.
    """
    return int(_total(tensor)) % (1 << 64)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Return the checksums of several tensors on one device, with one synchronisation."""
    if not tensors:
        return {}
    totals = torch.stack([_total(tensor) for tensor in tensors.values()]).tolist()
    return {name: total % (1 << 64) for name, total in zip(tensors, totals, strict=True)}


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum as int64 [], whose overflow is the modulo 2^64."""
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = _odd_numbers(tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        total += (chunk * odd[: chunk.numel()]).sum() + 2 * start * chunk.sum()
    return total


@cache
def _odd_numbers(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK, dtype=torch.int64, device=device) * 2 + 1
