"""Table of the kinds of media: how to measure, normalise and open items; and caches of opened media."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from relaxd.media.images import ImageSize, NormalImage, decode_png, measure_image, normalise_image
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.media.sounds import NormalSound, SoundSize, decode_wav, measure_sound, normalise_sound
from relaxd.media.sources import MediaError
from relaxd.media.videos import NormalVideo, VideoSize, measure_video, normalise_video

NormalMedia = NormalImage | NormalVideo | NormalSound
"""An image, video or sound in its normal form."""
MediaSize = ImageSize | VideoSize | SoundSize
"""Sizes of an image, video or sound, from the original to the number of tokens."""


@dataclass(frozen=True)
class MediaKind:
    """Functions that measure, normalise and open items of one kind of media."""

    measure: Callable[[Any, Any], MediaSize]
    """Function that returns a media item's sizes from its source, by the model's rule. Raises MediaError."""
    normalise: Callable[[Any, Any], NormalMedia]
    """Function that returns a media item in its normal form, from its source and the model's rule. Raises
    MediaError."""
    open: Callable[[bytes], np.ndarray]
    """Function that decodes a stored item, and returns its RGB pixels, uint8 [height, width, 3], or its sound, int16
    [samples]."""


MEDIA_KINDS: Mapping[str, MediaKind] = {
    IMAGE: MediaKind(measure_image, normalise_image, decode_png),
    VIDEO: MediaKind(measure_video, normalise_video, decode_png),
    AUDIO: MediaKind(measure_sound, normalise_sound, decode_wav),
}
"""All kinds of media by name."""


Item = TypeVar("Item")


class RecentItems(Generic[Item]):
    """Cache of the most recently used items by name, up to a total size. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache of items.

        Args:
            max_bytes: maximum size of the items that are kept, in bytes.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._items: OrderedDict[str, tuple[Item, int]] = OrderedDict()

    def get(self, name: str) -> Item | None:
        """Return the cached item of a name; None if the cache lacks it."""
        found = self._items.get(name)
        return None if found is None else found[0]

    def keep(self, name: str, item: Item, size: int) -> None:
        """Add an item of `size` bytes as the most recent one, and remove the oldest items beyond the limit."""
        self._bytes += size - self._items.get(name, (item, 0))[1]
        self._items[name] = item, size
        self._items.move_to_end(name)
        while self._bytes > self._max_bytes:
            _, (_, old) = self._items.popitem(last=False)
            self._bytes -= old

    def clear(self) -> None:
        """Remove all items from the cache."""
        self._items.clear()
        self._bytes = 0


class MediaCache:
    """Cache of recently used media in decoded form: pixels of images and videos, samples of sounds. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Create an empty cache of decoded media.

        Args:
            max_bytes: maximum size of the cache, in bytes. A larger item is returned but not kept.
        """
        self._kept: RecentItems[np.ndarray] = RecentItems(max_bytes)

    def load(
        self, kinds: Mapping[str, str], fetch: Callable[[Sequence[str]], Mapping[str, bytes]]
    ) -> dict[str, np.ndarray]:
        """Return media in decoded form (`MediaKind.open`) by their hashes. The arrays are read-only.

        Args:
            kinds: the kind of each item by its hash.
            fetch: returns the stored bytes of missing items, by their hashes; called at most once.

        Raises MediaError if `fetch` doesn't return an item, and the errors of `fetch`.
        """
        found = {name: values for name in kinds if (values := self._kept.get(name)) is not None}
        missing = [name for name in kinds if name not in found]
        if missing:
            fetched = fetch(missing)
            for name in missing:
                if name not in fetched:
                    raise MediaError(f"{kinds[name]} {name} isn't there any more")
                found[name] = MEDIA_KINDS[kinds[name]].open(fetched[name])
        for name in kinds:
            self._kept.keep(name, found[name], found[name].nbytes)
        return found
