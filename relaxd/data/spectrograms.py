"""Spectrograms of sounds in their normal form, which are what towers that hear get."""

from functools import lru_cache

import numpy as np
import torch
from transformers import WhisperFeatureExtractor

from relaxd.media import SoundRule

FULL_SCALE = 1 << 15
"""Sample that stands for 1."""


def spectrogram(samples: np.ndarray, rule: SoundRule) -> torch.Tensor:
    """Return the log-mel spectrogram of a sound, float32 [bands, frames].

    Each sound is taken alone: padded to the length of a longer one it would have other numbers at its end.
    """
    wave = samples.astype(np.float32) / FULL_SCALE
    found = _extractor(rule.rate, rule.mels, rule.window, rule.hop)(
        wave, sampling_rate=rule.rate, padding="longest", truncation=False, return_tensors="pt"
    )
    features: torch.Tensor = found.input_features[0]
    return features


@lru_cache
def _extractor(rate: int, mels: int, window: int, hop: int) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=mels, sampling_rate=rate, hop_length=hop, n_fft=window)
