"""DeepStack (arXiv 2406.04334): rows of images that the first layers add to the hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DeepStack:
    """Rows of the tower that are added to the hidden states after the first layers."""

    places: Tensor
    """int64 [M]: tokens, by number in this rank's slice."""
    rows: Sequence[Tensor]
    """[M, hidden] for each of the first layers."""

    def add(self, hidden: Tensor, layer: int) -> Tensor:
        """Return the hidden states [T, 1, hidden] after a layer, which is numbered over the whole model from 0."""
        if layer >= len(self.rows):
            return hidden
        return hidden.index_add(0, self.places, self.rows[layer].unsqueeze(1).to(hidden.dtype))
