"""Content of conversations: messages, and what they show and play.

`messages` is for rewards. The rest takes images from data to the model: `sources` and `images` read and normalise them,
and `layout` says where their tokens are.
"""

from relaxd.media.images import ImageRule, ImageSize, NormalImage, measure_image, normalise_image
from relaxd.media.layout import Grid, ImageTokens, Layout, expand, lay_out
from relaxd.media.sources import MediaError

__all__ = [
    "Grid",
    "ImageRule",
    "ImageSize",
    "ImageTokens",
    "Layout",
    "MediaError",
    "NormalImage",
    "expand",
    "lay_out",
    "measure_image",
    "normalise_image",
]
