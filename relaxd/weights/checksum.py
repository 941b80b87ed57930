"""A checksum by which two sides of a broadcast compare a tensor."""

from collections.abc import Mapping
from functools import cache

import torch

_CHUNK = 1 << 22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """An unsigned 64-bit checksum of a tensor's bits.

    The sum, modulo 2^64, of every element's bits (as a signed integer of its size) times the odd number 2 i + 1 at
    position i. It sees changed and swapped elements, and comes out the same whatever the order of summation: on any
    device and over any division of the tensor into pieces.
    """
    return int(_total(tensor)) % (1 << 64)


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The checksums of several tensors on one device, which is waited for only once."""
    if not tensors:
        return {}
    totals = torch.stack([_total(tensor) for tensor in tensors.values()]).tolist()
    return {name: total % (1 << 64) for name, total in zip(tensors, totals, strict=True)}


def _total(tensor: torch.Tensor) -> torch.Tensor:
    """The sum as int64 [], which wraps round: that is what modulo 2^64 means."""
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
