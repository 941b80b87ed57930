"""Patches of images and video made on a model's device, as numpy makes them on the host (`VisionModel.patches`)."""

import torch
from torch import Tensor

from relaxd.data.vision import VisionModel
from relaxd.media.patches import SCALE


def normalised(cut: Tensor, vision: VisionModel) -> Tensor:
    """Return patches as `VisionModel.patches` does, made on the device: so a byte of a pixel travels, and not eight.

    Args:
        cut: uint8 [patches, 3, frames, side, side], from `cut_patches`.
        vision: the model's rules.
    """
    mean, std = (cut.new_tensor(one, dtype=torch.float32)[:, None, None, None] for one in (vision.mean, vision.std))
    normal = ((cut.double() * SCALE).float() - mean) / std
    return normal.expand(-1, -1, vision.times, -1, -1).reshape(len(cut), -1)
