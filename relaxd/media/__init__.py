"""Content of conversations: messages, and what they show and play.

`messages` is for rewards. The rest takes images and video from data to the model: `placeholders` finds them in prompts,
`sources`, `images` and `videos` read and normalise them, `layout` says where their tokens are, `prompt_media` stores
them with a group, and `cache` and `patches` turn them into what the model's tower gets.
"""

from relaxd.media.cache import MediaCache
from relaxd.media.images import ImageRule, ImageSize, NormalImage, measure_image, normalise_image
from relaxd.media.layout import Grid, ImageTokens, Layout, expand, lay_out
from relaxd.media.patches import patches
from relaxd.media.placeholders import IMAGE, KINDS, VIDEO, MediaColumn, MediaItem, MediaReader, shown_text
from relaxd.media.sources import MediaError
from relaxd.media.videos import (
    MediaSize,
    NormalMedia,
    NormalVideo,
    VideoRule,
    VideoSize,
    frames_of,
    measure_video,
    normalise_video,
)

__all__ = [
    "IMAGE",
    "KINDS",
    "VIDEO",
    "Grid",
    "ImageRule",
    "ImageSize",
    "ImageTokens",
    "Layout",
    "MediaCache",
    "MediaColumn",
    "MediaError",
    "MediaItem",
    "MediaReader",
    "MediaSize",
    "NormalImage",
    "NormalMedia",
    "NormalVideo",
    "VideoRule",
    "VideoSize",
    "expand",
    "frames_of",
    "lay_out",
    "measure_image",
    "measure_video",
    "normalise_image",
    "normalise_video",
    "patches",
    "shown_text",
]
