"""Inputs of a model's towers: patches of images and video, made on its device, and spectrograms of sounds."""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from relaxd.data.vision import VisionModel
from relaxd.media import SoundRule
from relaxd.media.patches import SCALE

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

FULL_SCALE = 1 << 15
"""Sample value that stands for 1 in a sound's normal form."""


def normalised(cut: Tensor, vision: VisionModel) -> Tensor:
    """Return patches as `VisionModel.patches` does, made on the device: so a byte of a pixel travels, and not eight.

    Args:
        cut: uint8 [patches, 3, frames, side, side], from `cut_patches`.
        vision: the model's rules.
    """
    mean, std = (cut.new_tensor(one, dtype=torch.float32)[:, None, None, None] for one in (vision.mean, vision.std))
    normal = ((cut.double() * SCALE).float() - mean) / std
    return normal.expand(-1, -1, vision.times, -1, -1).reshape(len(cut), -1)


def spectrogram(samples: np.ndarray, rule: SoundRule) -> Tensor:
    """Return the log-mel spectrogram of a sound, float32 [bands, frames].

    Each sound is taken alone: padded to the length of a longer one it would have other numbers at its end.
    """
    wave = samples.astype(np.float32) / FULL_SCALE
    found = _extractor(rule.rate, rule.mels, rule.window, rule.hop)(
        wave, sampling_rate=rule.rate, padding="longest", truncation=False, return_tensors="pt"
    )
    features: Tensor = found.input_features[0]
    return features


@lru_cache
def _extractor(rate: int, mels: int, window: int, hop: int) -> "WhisperFeatureExtractor":
    from transformers import WhisperFeatureExtractor  # half a second, which most ranks can do without

    return WhisperFeatureExtractor(feature_size=mels, sampling_rate=rate, hop_length=hop, n_fft=window)
