"""Inputs of a model's towers, which encode media, and a cache of the towers' outputs. The inputs are computed on the
model's device."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from relaxd.data.vision import VisionModel
from relaxd.media.images import SCALE
from relaxd.media.kinds import RecentItems
from relaxd.media.sounds import SoundRule

if TYPE_CHECKING:
    from transformers import WhisperFeatureExtractor

FULL_SCALE = 1 << 15
"""Sample value of a sound in normal form (int16) that stands for an amplitude of 1."""


def normalised(cut: Tensor, vision: VisionModel) -> Tensor:
    """Return the tower's input patches, as `VisionModel.patches` does, but computed on the device. Copying the pixels
    there takes one byte per value instead of eight.

    Args:
        cut: pixels by patch from `cut_patches`, uint8 [patches, 3, frames, side, side].
        vision: the model's rules for media.
    """
    mean, std = (cut.new_tensor(one, dtype=torch.float32)[:, None, None, None] for one in (vision.mean, vision.std))
    normal = ((cut.double() * SCALE).float() - mean) / std
    return normal.expand(-1, -1, vision.times, -1, -1).reshape(len(cut), -1)


def spectrogram(samples: np.ndarray, rule: SoundRule) -> Tensor:
    """Return the log-mel spectrogram of a sound, float32 [bands, frames].

    Each sound is processed alone: padding to the length of a longer sound would change its last values.
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


class TowerOutputs:
    """Cache of the outputs of frozen towers, by media item, until a parameter of the towers changes. For use by one
    thread.

    A tower gets each item alone, so its output is bit for bit the same, whatever else is in the batch and whether it
    was cached. So a restarted trainer that repeats a step from its file gets the same output.
    """

    def __init__(self, max_bytes: int, *, on_host: bool = False) -> None:
        """Create an empty cache.

        Args:
            max_bytes: maximum size of the cached outputs, in bytes; 0 caches none.
            on_host: True to keep the outputs in the host's memory, not on the towers' device.
        """
        self._kept: RecentItems[list[Tensor]] = RecentItems(max_bytes)
        self._on_host = on_host
        self._versions = -1
        self.runs = 0
        """Number of media items that a tower has run for, because they weren't cached."""
        self.asked = 0
        """Number of media items whose outputs were requested, cached or not."""

    @torch.no_grad()
    def of(
        self, parameters: Iterable[Tensor], items: Mapping[str, Callable[[], list[Tensor]]]
    ) -> dict[str, list[Tensor]]:
        """Return the towers' outputs for media items, by the item's hash, on the towers' device.

        Args:
            parameters: the towers' parameters.
            items: functions that run the tower for one item alone, by the item's hash.
        """
        parameters = list(parameters)
        # Each write into a parameter raises its version; received weights that haven't changed aren't written.
        if (versions := sum(one._version for one in parameters)) != self._versions:
            self._kept.clear()
            self._versions = versions
        kept = {name: rows for name in items if (rows := self._kept.get(name)) is not None}
        found = {
            name: [one.to(parameters[0].device) for one in kept[name]] if name in kept else run()
            for name, run in items.items()
        }
        self.runs += len(items) - len(kept)
        self.asked += len(items)
        # Behind all passes, because a copy to the host waits for the device.
        for name, outputs in found.items():
            stored = kept.get(name) or ([one.cpu() for one in outputs] if self._on_host else outputs)
            self._kept.keep(name, stored, sum(one.nbytes for one in stored))
        return found
