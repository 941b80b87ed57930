"""The media of a micro-batch on one rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from relaxd.media import Grid


@dataclass(frozen=True)
class DeviceImages:
    """I different items, of which M rows of the towers' output belong to tokens of this rank's slice."""

    hashes: tuple[str, ...]
    """The items, I."""
    towers: tuple[str, ...]
    """Name of each item's tower."""
    inputs: Callable[[int], Tensor]
    """Returns the input of an item's tower, by the item's index: patches, float32 [patches, values], or a spectrogram,
    float32 [bands, frames]."""
    grids: Sequence[Grid]
    """Size of each item."""
    counts: Sequence[int]
    """Number of rows of each item."""
    rows: Tensor
    """int64 [M]: rows of the towers' output."""
    places: Tensor
    """int64 [M]: their tokens, by number in this rank's slice."""
