"""Content of conversations: messages, and what they show and play.

`messages` is for rewards. The rest takes images, video and sound from data to the model: `placeholders` finds them in
prompts, `sources`, `images`, `videos` and `sounds` read and normalise them, as `kinds` lists, `layout` says where their
tokens are, `prompt_media` stores them with a group, and `cache` and `patches` turn them into what the model's towers
get.
"""

from relaxd.media.images import ImageRule, ImageSize, NormalImage, decode_png, measure_image, normalise_image
from relaxd.media.kinds import MEDIA_KINDS, MediaCache, MediaKind, MediaSize, NormalMedia
from relaxd.media.media_tokens import Grid, Layout, MediaTokens, expand, lay_out
from relaxd.media.patches import patches
from relaxd.media.placeholders import AUDIO, IMAGE, KINDS, VIDEO, MediaColumn, MediaItem, MediaReader, shown_text
from relaxd.media.sounds import NormalSound, SoundRule, SoundSize, decode_wav, encode_wav, normalise_sound
from relaxd.media.sources import MediaError
from relaxd.media.videos import (
    NormalVideo,
    VideoRule,
    VideoSize,
    frames_of,
    measure_video,
    normalise_video,
)

__all__ = [
    "AUDIO",
    "IMAGE",
    "KINDS",
    "MEDIA_KINDS",
    "VIDEO",
    "Grid",
    "ImageRule",
    "ImageSize",
    "Layout",
    "MediaCache",
    "MediaColumn",
    "MediaError",
    "MediaItem",
    "MediaKind",
    "MediaReader",
    "MediaSize",
    "MediaTokens",
    "NormalImage",
    "NormalMedia",
    "NormalSound",
    "NormalVideo",
    "SoundRule",
    "SoundSize",
    "VideoRule",
    "VideoSize",
    "decode_png",
    "decode_wav",
    "encode_wav",
    "expand",
    "frames_of",
    "lay_out",
    "measure_image",
    "measure_video",
    "normalise_image",
    "normalise_sound",
    "normalise_video",
    "patches",
    "shown_text",
]
