"""Token ids with images as engine and trainer lay them out: expanded ids, modality and positions, in numpy.

A chat template writes one image token for each image. The model sees one for each merged square of patches, with
three positions (M-RoPE: time, row, column; Qwen2-VL, arXiv 2409.12191). Qwen2.5-VL and Qwen3-VL lay out images alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaxd.media.sources import MediaError

TEXT, IMAGE = 0, 1
"""Modalities of tokens. 2 and 3 are for video and sound."""
Grid = tuple[int, int, int]
"""Patches of an image: time (1), rows, columns."""


@dataclass(frozen=True)
class ImageTokens:
    """Tokens by which a model's prompts have images."""

    token: int
    """Id of the image token."""
    merge: int
    """Number of patches, along each side, that become one token."""

    def count(self, grid: Grid) -> int:
        """Return the number of tokens of an image."""
        return grid[0] * grid[1] * grid[2] // self.merge**2


@dataclass(frozen=True)
class Layout:
    """Tokens as the model sees them, T of them."""

    tokens: np.ndarray
    """Token ids, int32 [T]."""
    modality: np.ndarray
    """TEXT or IMAGE, uint8 [T]. The rows of the vision tower's output belong to the image's tokens in order."""
    positions: np.ndarray
    """Positions by time, row and column, float32 [3, T]."""
    next_position: float
    """Position, on all three axes, of what follows: the first token of the answer. An answer isn't searched for images,
    so a sampled image token is a token like any other."""


def expand(short: Sequence[int] | np.ndarray, grids: Sequence[Grid], images: ImageTokens) -> np.ndarray:
    """Repeat each image token once for each token of its image.

    Args:
        short: ids with one image token for each image.
        grids: the images' patches, in the order of the prompt.
        images: the model's.

    Returns:
        Token ids, int32 [T].

    Raises:
        MediaError: there are more or fewer image tokens than images.
    """
    ids = np.asarray(short, np.int32)
    is_image = ids == images.token
    if (found := int(is_image.sum())) != len(grids):
        raise MediaError(
            f"has {found} image tokens (id {images.token}) for {len(grids)} images after templating: the chat template "
            "must write one for each image, and texts none"
        )
    repeats = np.ones(len(ids), np.int64)
    repeats[is_image] = [images.count(grid) for grid in grids]
    return np.repeat(ids, repeats)


def lay_out(
    tokens: np.ndarray,
    grids: Sequence[Grid],
    images: ImageTokens,
    start: float = 0.0,
    *,
    begins: Sequence[int] | None = None,
) -> Layout:
    """Return modality and positions of expanded ids.

    An image of h rows and w columns of tokens that begins at p has the positions (p, p + row, p + column), and what
    follows it goes on at p + max(h, w). Text has equal positions on all axes.

    Args:
        tokens: expanded ids, [T].
        grids: the images' patches, in the order of the prompt.
        images: the model's.
        start: position of the first token, for a part that follows an answer.
        begins: index of each image's first token, for ids that have answers in them; None: every image token is an
            image's.

    Raises:
        MediaError: the image tokens aren't those of these images.
    """
    tokens = np.asarray(tokens, np.int32)
    counts = [images.count(grid) for grid in grids]
    if begins is None:
        places = np.flatnonzero(tokens == images.token)
        if len(places) != sum(counts):
            raise MediaError(f"has {len(places)} tokens of images, but its images have {sum(counts)}")
        begins = places[np.cumsum([0, *counts[:-1]])].tolist() if counts else []
    modality, end = np.zeros(len(tokens), np.uint8), 0
    # By how much each token moves what follows it: an image's first token by all of the image.
    advances = np.ones(len(tokens))
    for first, count, grid in zip(begins, counts, grids, strict=True):
        if first < end:
            raise MediaError(f"has an image that begins at token {first}, before token {end}, where the last one ends")
        end = first + count
        if end > len(tokens) or (tokens[first:end] != images.token).any():
            raise MediaError(f"has other tokens among those of the image that begins at token {first}")
        modality[first:end] = IMAGE
        advances[first:end] = 0
        advances[first] = max(grid[1:]) // images.merge
    line = start + np.cumsum(advances) - advances
    positions = np.tile(line, (3, 1))
    for first, grid in zip(begins, grids, strict=True):
        rows, columns = grid[1] // images.merge, grid[2] // images.merge
        block = np.stack([np.zeros(rows * columns), *(axis.ravel() for axis in np.indices((rows, columns)))])
        positions[:, first : first + rows * columns] = line[first] + block
    return Layout(tokens, modality, positions.astype(np.float32), start + float(advances.sum()))
