"""The kinds of media, declared once: how to read, store, open and show items of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxd.media.images import ImageSize, NormalImage, decode_png, measure_image, normalise_image
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.media.sounds import NormalSound, SoundSize, decode_wav, measure_sound, normalise_sound
from relaxd.media.videos import NormalVideo, VideoSize, measure_video, normalise_video

NormalMedia = NormalImage | NormalVideo | NormalSound
"""An item in its normal form."""
MediaSize = ImageSize | VideoSize | SoundSize
"""Sizes of an item."""


@dataclass(frozen=True)
class MediaKind:
    """A kind of media."""

    measure: Callable[[Any, Any], MediaSize]
    """Returns the sizes of an item from its source, by the model's rule for this kind. Raises MediaError."""
    normalise: Callable[[Any, Any], NormalMedia]
    """Returns an item in its normal form, from the same. Raises MediaError."""
    open: Callable[[bytes], np.ndarray]
    """Returns the values of a stored item: RGB pixels, uint8 [height, width, 3], or samples, int16 [samples]."""


MEDIA_KINDS: Mapping[str, MediaKind] = {
    IMAGE: MediaKind(measure_image, normalise_image, decode_png),
    VIDEO: MediaKind(measure_video, normalise_video, decode_png),
    AUDIO: MediaKind(measure_sound, normalise_sound, decode_wav),
}
"""All kinds by name."""
