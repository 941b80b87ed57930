"""Images that a process has looked at lately, by their hashes."""

import io
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from relaxd.media.sources import MediaError


class MediaCache:
    """The pixels of images, of which those that were used last are kept. For one thread."""

    def __init__(self, max_bytes: int) -> None:
        """Make an empty cache.

        Args:
            max_bytes: maximum size of the pixels that are kept, in bytes. An image that is larger is still returned.
        """
        self._max_bytes = max_bytes
        self._bytes = 0
        self._pixels: OrderedDict[str, np.ndarray] = OrderedDict()

    def load(
        self, hashes: Sequence[str], fetch: Callable[[Sequence[str]], Mapping[str, bytes]]
    ) -> dict[str, np.ndarray]:
        """Return the RGB pixels of images by their hashes, uint8 [height, width, 3], read-only.

        Args:
            hashes: the images.
            fetch: returns the PNGs (`NormalImage.png`) of the images that aren't here, by their hashes; called once.

        Raises MediaError: the image isn't where it is fetched from; and what `fetch` raises.
        """
        wanted = list(dict.fromkeys(hashes))
        found = {name: self._pixels[name] for name in wanted if name in self._pixels}
        missing = [name for name in wanted if name not in found]
        if missing:
            fetched = fetch(missing)
            for name in missing:
                if name not in fetched:
                    raise MediaError(f"image {name} isn't there any more")
                found[name] = decode_png(fetched[name])
        for name in wanted:
            self._keep(name, found[name])
        return found

    def _keep(self, name: str, pixels: np.ndarray) -> None:
        if name not in self._pixels:
            self._bytes += pixels.nbytes
        self._pixels[name] = pixels
        self._pixels.move_to_end(name)
        while self._bytes > self._max_bytes:
            _, old = self._pixels.popitem(last=False)
            self._bytes -= old.nbytes


def decode_png(png: bytes) -> np.ndarray:
    """Return the pixels of a normal image, uint8 [height, width, 3], read-only. Raises OSError: it is broken."""
    from PIL import Image

    pixels = np.array(Image.open(io.BytesIO(png)))
    pixels.setflags(write=False)
    return pixels
