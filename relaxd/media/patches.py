"""Patches of images in their normal form, which are what vision towers get, in numpy."""

from collections.abc import Sequence

import numpy as np

from relaxd.media.images import ImageRule

SCALE = 1 / 255
"""Factor of every known image processor."""


def patches(
    pixels: np.ndarray, rule: ImageRule, mean: Sequence[float], std: Sequence[float], times: int = 2
) -> np.ndarray:
    """Return the patches of an image, bit for bit those of transformers' Qwen2VLImageProcessorPil.

    Args:
        pixels: RGB of the normal form, uint8 [height, width, 3]; both sides are multiples of `rule.factor`.
        rule: the model's.
        mean: of each channel, of values from 0 to 1.
        std: the same.
        times: how often a patch is repeated, as the frames that a video would have (temporal_patch_size).

    Returns:
        float32 [rows x columns, 3 x times x patch x patch]. Patches that become one token are neighbours.
    """
    patch, merge = rule.patch, rule.merge
    rows, columns = pixels.shape[0] // patch, pixels.shape[1] // patch
    # The processor scales in float64, rounds to float32 and normalises there: 256 values of each channel are all.
    scaled = (np.arange(256, dtype=np.float64) * SCALE).astype(np.float32)[:, None]
    table = (scaled - np.asarray(mean, np.float32)) / np.asarray(std, np.float32)
    normalised = table[pixels, np.arange(3)].reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    cut = normalised.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    return np.broadcast_to(cut, (*cut.shape[:5], times, patch, patch)).reshape(rows * columns, -1)
