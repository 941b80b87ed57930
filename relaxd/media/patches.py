"""Patches of images in their normal form, which are what vision towers get, in numpy."""

from collections.abc import Sequence

import numpy as np

from relaxd.media.images import ImageRule

SCALE = 1 / 255
"""Factor of every known image processor."""


def cut_patches(pixels: np.ndarray, rule: ImageRule) -> np.ndarray:
    """Return the pixels of an image by patch, uint8 [rows x columns, 3, patch, patch].

    Args:
        pixels: RGB of the normal form, uint8 [height, width, 3]; both sides are multiples of `rule.factor`.
        rule: the model's. Patches that become one token are neighbours.
    """
    patch, merge = rule.patch, rule.merge
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    squares = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return squares.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, patch, patch)


def patches(
    pixels: np.ndarray, rule: ImageRule, mean: Sequence[float], std: Sequence[float], times: int = 2
) -> np.ndarray:
    """Return the patches of an image, bit for bit those of transformers' Qwen2VLImageProcessorPil.

    Args:
        pixels: as for `cut_patches`.
        rule: the model's.
        mean: of each channel, of values from 0 to 1.
        std: the same.
        times: how often a patch is repeated, as the frames that a video would have (temporal_patch_size).

    Returns:
        float32 [rows x columns, 3 x times x patch x patch].
    """
    cut = cut_patches(pixels, rule)
    # The processor scales in float64, rounds to float32 and normalises there.
    scaled = (cut * SCALE).astype(np.float32)
    normal = (scaled - _by_channel(mean)) / _by_channel(std)
    return np.broadcast_to(normal[:, :, None], (*cut.shape[:2], times, *cut.shape[2:])).reshape(len(cut), -1)


def _by_channel(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, np.float32)[:, None, None]
