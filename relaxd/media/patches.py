"""Patches of normal images and video, the input of vision towers, in numpy."""

from collections.abc import Sequence

import numpy as np

from relaxd.media.images import ImageRule
from relaxd.media.media_tokens import Grid
from relaxd.media.sources import MediaError

SCALE = 1 / 255
"""Factor from pixel values to 0 to 1, as in every supported image processor."""


def cut_patches(pixels: np.ndarray, rule: ImageRule, grid: Grid) -> np.ndarray:
    """Return the pixels of an item by patch, uint8 [times x rows x columns, 3, frames of a patch, patch, patch].

    Args:
        pixels: RGB of the normal form, uint8 [height, width, 3]; both sides are multiples of `rule.factor`.
        rule: the model's rule. Patches that form one token are adjacent in the result.
        grid: the item's patches.

    Raises:
        MediaError: the grid doesn't fit the pixels.
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
    """Return the normalised patches of an item; for an image the same bits as transformers' Qwen2VLImageProcessorPil.

    Args:
        pixels: as for `cut_patches`.
        rule: the model's.
        grid: the item's patches.
        mean: mean of each channel, for values from 0 to 1.
        std: standard deviation of each channel.
        times: number of frames of a patch (temporal_patch_size); an image's frame is repeated.

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
