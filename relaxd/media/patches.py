"""Patches of normal images and video, the input of vision towers, in numpy."""

from collections.abc import Sequence

import numpy as np

from relaxd.media.images import ImageRule
from relaxd.media.media_tokens import Grid
from relaxd.media.sources import MediaError

SCALE = 1 / 255
"""Factor from pixels to normalised values in every supported image processor."""


def cut_patches(pixels: np.ndarray, rule: ImageRule, grid: Grid) -> np.ndarray:
    """Return the pixels of an item by patch, uint8 [times x rows x columns, 3, frames of a patch, patch, patch].

    Args:
        pixels: RGB of the normal form, uint8 [height, width, 3]; both sides are multiples of `rule.factor`.
        rule: the model's. Patches that become one token are neighbours.
        grid: the item's patches.

    Raises:
        MediaError: it isn't the grid of these pixels.
    """
    patch, merge = rule.patch, rule.merge
    times, rows, columns = grid
    frames, rest = divmod(pixels.shape[0], times * rows * patch)
    if rest or not frames or pixels.shape[1] != columns * patch:
        raise MediaError(f"has {pixels.shape[1]} x {pixels.shape[0]} pixels, which don't fit its grid {list(grid)}")
    squares = pixels.reshape(times, frames, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return squares.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, 3, frames, patch, patch)


def patches(
    pixels: np.ndarray, rule: ImageRule, grid: Grid, mean: Sequence[float], std: Sequence[float], times: int = 2
) -> np.ndarray:
    """Return the patches of an item, bit for bit those of transformers' Qwen2VLImageProcessorPil for an image.

    Args:
        pixels: as for `cut_patches`.
        rule: the model's.
        grid: the item's patches.
        mean: of each channel, of values from 0 to 1.
        std: the same.
        times: frames of a patch (temporal_patch_size), which an image repeats.

    Returns:
        float32 [patches, 3 x times x patch x patch].
    """
    cut = cut_patches(pixels, rule, grid)
    # The processor scales in float64, rounds to float32 and normalises there.
    scaled = (cut * SCALE).astype(np.float32)
    normal = (scaled - _by_channel(mean)) / _by_channel(std)
    return np.broadcast_to(normal, (*cut.shape[:2], times, *cut.shape[3:])).reshape(len(cut), -1)


def _by_channel(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, np.float32)[:, None, None, None]
