"""The images of a micro-batch on one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeviceImages:
    """I different images, of which M rows of the tower's output belong to tokens of this rank's slice."""

    hashes: tuple[str, ...]
    """The images, I."""
    patches: Callable[[Sequence[int]], Tensor]
    """Returns the patches of some images by their indices, as the tower takes them: float32 [patches, values]."""
    grids: Tensor
    """int64 [I, 3]: patches of each image by time, row and column."""
    rows: Tensor
    """int64 [M]: rows of the tower's output."""
    places: Tensor
    """int64 [M]: their tokens, by number in this rank's slice."""
