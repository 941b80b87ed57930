"""Images of prompts: in sequences and in packed micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from relaxd.media import Grid, ImageTokens, lay_out
from services.trainer.megatron.rank_messages import message


@message
@dataclass(frozen=True)
class Image:
    """An image in its normal form."""

    sha256: str
    """Its identity."""
    grid: Grid
    """Patches by time, row and column."""
    pixels: NDArray[np.uint8]
    """uint8 [height, width, 3]."""


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt of P tokens, and where the model has them."""

    images: tuple[Image, ...]
    """In the order of the prompt."""
    places: NDArray[np.int64]
    """int64 [M]: the prompt's tokens that stand for images. The tower's rows belong to them in order."""
    positions: NDArray[np.float32]
    """float32 [3, P]: positions of the prompt's tokens by time, row and column."""
    next_position: float
    """Position of the first token after the prompt."""

    @classmethod
    def of(cls, prompt: NDArray[np.integer], images: Sequence[Image], tokens: ImageTokens) -> Self:
        """Lay out a prompt with its images.

        Args:
            prompt: expanded token ids, [P].
            images: its images.
            tokens: the model's tokens for images.

        Raises:
            MediaError: the prompt's image tokens aren't those of these images.
        """
        layout = lay_out(prompt, [image.grid for image in images], tokens)
        return cls(tuple(images), np.flatnonzero(layout.modality), layout.positions, layout.next_position)

    def positions_of(self, tokens: int) -> NDArray[np.float32]:
        """Return the positions of a sequence that begins with the prompt, float32 [3, tokens]."""
        rest = np.float32(self.next_position) + np.arange(tokens - self.positions.shape[1], dtype=np.float32)
        return np.concatenate((self.positions, np.tile(rest, (3, 1))), axis=1)


@message
@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch of T tokens, each once."""

    images: tuple[Image, ...]
    """The images, whose rows in the tower's output follow one another."""
    places: NDArray[np.int64]
    """int64 [M]: tokens that stand for images."""
    rows: NDArray[np.int64]
    """int64 [M]: rows of the tower's output that belong to them."""


def pack_images(prompts: Sequence[tuple[int, PromptImages]]) -> PackedImages | None:
    """Return the images of prompts that are stored in a row; None if they have none.

    Args:
        prompts: begin of each stored prompt in the row, and its images.
    """
    first: dict[str, int] = {}
    images: list[Image] = []
    places, rows, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for begin, prompt in prompts:
        places.append(begin + prompt.places)
        patches = sum(int(np.prod(image.grid)) for image in prompt.images)
        for image in prompt.images:
            own = int(np.prod(image.grid)) * len(prompt.places) // patches
            if image.sha256 not in first:
                first[image.sha256] = count
                images.append(image)
                count += own
            rows.append(first[image.sha256] + np.arange(own))
    return PackedImages(tuple(images), np.concatenate(places), np.concatenate(rows)) if images else None
