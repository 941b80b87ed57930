"""Patches that are made on a device, against those in numpy."""

import numpy as np
import torch

from relaxd.data.towers import normalised
from relaxd.data.vision import CLIP_MEAN, CLIP_STD, VisionModel
from relaxd.media.images import ImageRule, cut_patches
from relaxd.media.media_tokens import MediaTokens


def test_they_are_the_same_bit_for_bit() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (128, 96, 3), dtype=np.uint8)
    for mean, std, times in ((CLIP_MEAN, CLIP_STD, 2), ((0.5,) * 3, (0.5,) * 3, 1)):
        vision = VisionModel(ImageRule(16, 2, 1024, 65536), MediaTokens(7, 2), mean, std, times)
        for grid in ((1, 8, 6), (2 // times, 8 // (2 // times) // times, 6)):  # an image; a video
            ours = normalised(torch.from_numpy(cut_patches(pixels, vision.rule, grid)), vision)
            np.testing.assert_array_equal(ours.numpy(), vision.patches(pixels, grid))
