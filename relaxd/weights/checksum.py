"""A checksum by which two sides of a broadcast compare a tensor."""

import torch

_CHUNK = 1 << 20
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> int:
    """An unsigned 64-bit checksum of a tensor's bits.

    The sum, modulo 2^64, of every element's bits (as a signed integer of its size) times the odd number 2 i + 1 at
    position i. It sees changed and swapped elements, and comes out the same whatever the order of summation: on any
    device and over any division of the tensor into pieces.
    """
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = 0
    for start in range(0, words.numel(), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        positions = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)
        total += int((chunk * (2 * positions + 1)).sum())  # int64 wraps round, which is what modulo 2^64 means
    return total % (1 << 64)
