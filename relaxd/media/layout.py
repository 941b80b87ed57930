"""Token ids with images and video as engine and trainer lay them out: expanded ids, modality, positions, in numpy.

A chat template writes one token for each item. The model sees one for each merged square of patches, with three
positions (M-RoPE: time, row, column; Qwen2-VL, arXiv 2409.12191). Qwen2.5-VL and Qwen3-VL lay out images alike.
Qwen3-VL (arXiv 2511.21631) lays out a video as images, one for each of its times, each of which a text says before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from relaxd.media.sources import MediaError

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Modalities of tokens. 3 is for sound."""
NONE = -1
"""In place of the id of a token that a model doesn't have."""
Grid = tuple[int, int, int]
"""Patches of an item: time (1 of an image), rows, columns."""
Labels = Sequence[Sequence[int]]
"""Ids of the texts that say the times of a video, one for each; empty for an image."""


@dataclass(frozen=True)
class ImageTokens:
    """Tokens by which a model's prompts have images and video."""

    token: int
    """Id of the image token."""
    merge: int
    """Number of patches, along each side, that become one token."""
    video: int = NONE
    """Id of the video token."""
    start: int = NONE
    """Id of the token before each time of a video."""
    end: int = NONE
    """Id of the token behind it."""

    def count(self, grid: Grid) -> int:
        """Return the number of tokens that an item's patches become."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def of_item(self, grid: Grid, labels: Labels) -> np.ndarray:
        """Return the ids of an item, int32 [T]."""
        if not labels:
            return np.full(self.count(grid), self.token, np.int32)
        frame = [self.start, *[self.video] * self.count((1, *grid[1:])), self.end]
        return np.array([token for label in labels for token in (*label, *frame)], np.int32)


@dataclass(frozen=True)
class Layout:
    """Tokens as the model sees them, T of them."""

    tokens: np.ndarray
    """Token ids, int32 [T]."""
    modality: np.ndarray
    """TEXT, IMAGE or VIDEO, uint8 [T]. The rows of the vision tower's output belong to tokens of the last two in order.
    """
    positions: np.ndarray
    """Positions by time, row and column, float32 [3, T]."""
    next_position: float
    """Position, on all three axes, of what follows: the first token of the answer. An answer isn't searched for media,
    so a sampled image token is a token like any other."""


def expand(
    short: Sequence[int] | np.ndarray, grids: Sequence[Grid], images: ImageTokens, labels: Sequence[Labels] = ()
) -> np.ndarray:
    """Put the tokens of each item into the place of its one token.

    Args:
        short: ids with one token for each item.
        grids: the items' patches, in the order of the prompt.
        images: the model's.
        labels: the items' labels, in the same order; empty: there are only images.

    Returns:
        Token ids, int32 [T].

    Raises:
        MediaError: there are more or fewer tokens than items, or those of images and video have another order.
    """
    ids, labels = np.asarray(short, np.int32), labels or [()] * len(grids)
    places = np.flatnonzero((ids == images.token) | ((ids == images.video) & (ids != NONE)))
    items = [images.video if one else images.token for one in labels]
    for kind, token in (("image", images.token), ("video", images.video)):
        if (found := int((ids[places] == token).sum())) != (wanted := items.count(token)):
            raise MediaError(
                f"has {found} {kind} tokens (id {token}) for {wanted} {kind}s after templating: the chat template must "
                f"write one for each {kind}, and texts none"
            )
    if ids[places].tolist() != items:
        raise MediaError("has its images and videos in another order after templating: change the chat template")
    pieces, end = [], 0
    for place, grid, label in zip(places.tolist(), grids, labels, strict=True):
        pieces += [ids[end:place], images.of_item(grid, label)]
        end = place + 1
    return np.concatenate([*pieces, ids[end:]])


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
    follows it goes on at p + max(h, w). So does each time of a video. Text has equal positions on all axes.

    Args:
        tokens: expanded ids, [T].
        grids: the items' patches, in the order of the prompt.
        images: the model's.
        start: position of the first token, for a part that follows an answer.
        begins: index of each image's first token, for ids that have answers in them; None: every token of media is an
            item's. A video has no single place, so there must be none with begins.

    Raises:
        MediaError: the tokens of media aren't those of these items.
    """
    if wrong := next((grid for grid in grids if min(grid) < 1), None):
        raise MediaError(f"has an item with the grid {list(wrong)}: each number must be at least 1")
    tokens = np.asarray(tokens, np.int32)
    kinds = np.zeros(len(tokens), np.uint8)
    kinds[tokens == images.token] = IMAGE
    if images.video != NONE:
        kinds[tokens == images.video] = VIDEO
    frames: list[Grid] = [(1, *grid[1:]) for grid in grids for _ in range(grid[0])]
    counts = [images.count(grid) for grid in frames]
    if begins is None:
        places = np.flatnonzero(kinds)
        if len(places) != sum(counts):
            raise MediaError(f"has {len(places)} tokens of images and video, but its items have {sum(counts)}")
        begins = places[np.cumsum([0, *counts[:-1]])].tolist() if counts else []
    if len(begins) != len(frames):
        raise MediaError(f"has {len(begins)} begins of images, but its items have {len(frames)} images and frames")
    modality, end = np.zeros(len(tokens), np.uint8), 0
    # By how much each token moves what follows it: an image's first token by all of the image.
    advances = np.ones(len(tokens))
    for first, count, grid in zip(begins, counts, frames, strict=True):
        if first < end:
            raise MediaError(f"has an image that begins at token {first}, before token {end}, where the last one ends")
        end = first + count
        if end > len(tokens) or kinds[first] == TEXT or (kinds[first:end] != kinds[first]).any():
            raise MediaError(f"has other tokens among those of the image that begins at token {first}")
        modality[first:end] = kinds[first]
        advances[first:end] = 0
        advances[first] = max(grid[1:]) // images.merge
    line = start + np.cumsum(advances) - advances
    positions = np.tile(line, (3, 1))
    for first, grid in zip(begins, frames, strict=True):
        rows, columns = grid[1] // images.merge, grid[2] // images.merge
        block = np.stack([np.zeros(rows * columns), *(axis.ravel() for axis in np.indices((rows, columns)))])
        positions[:, first : first + rows * columns] = line[first] + block
    return Layout(tokens, modality, positions.astype(np.float32), start + float(advances.sum()))
