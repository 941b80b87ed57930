"""Content of conversations: messages, and what they show and play.

`messages` is for rewards. The rest takes images from data to the model: `sources` and `images` read and normalise them.
"""

from relaxd.media.images import ImageRule, ImageSize, NormalImage, measure_image, normalise_image
from relaxd.media.sources import MediaError

__all__ = ["ImageRule", "ImageSize", "MediaError", "NormalImage", "measure_image", "normalise_image"]
