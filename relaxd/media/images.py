"""Images in their normal form: upright RGB, resized by the model's rule, stored as PNG. Also cuts images and video
into patches, the input of vision towers.

The same item with the same rule has the same pixels and the same hash everywhere, so engine and trainer, which fetch an
image by its hash, see the same image. Needs Pillow (extra [media]), which is imported when the first image is read."""

import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from relaxd.media.media_tokens import Grid
from relaxd.media.placeholders import IMAGE
from relaxd.media.sources import MediaError, read_source

if TYPE_CHECKING:
    from PIL.Image import Image

FORM = "image/1"
"""Version of images' normal form. It is part of an image's hash, so another version gives other hashes."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Image formats that are decoded, by Pillow's names. Pillow supports more, some of which run other programs."""
MAX_PIXELS = 1 << 25
"""Maximum number of pixels of an image before it is resized; a frame of 8K video has slightly fewer."""
MIN_SIDE = 8
"""Minimum length of an image's side, in pixels. A smaller image is a mistake in the data."""
MAX_RATIO = 200
"""Maximum ratio of an image's longer side to its shorter side, as in the rule of Qwen's models."""
ORIENTATION = 0x0112
"""EXIF tag of the orientation. Values 5 to 8 mean that the image lies on its side."""


@dataclass(frozen=True)
class ImageRule:
    """A model's rule for the size of images: both sides are multiples of `factor`, and the area is within limits."""

    patch: int
    """Side length of a patch, in pixels."""
    merge: int
    """Number of patches along each side of the square that one token covers."""
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Side length of the square that one token covers, in pixels."""
        return self.patch * self.merge

    def resized(self, width: int, height: int, frames: int = 1, counted: int = 1) -> tuple[int, int]:
        """Return width and height in pixels after resizing, by `smart_resize` of Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

        For a video the limits are for the pixels of all frames: the pixels of `counted` frames are compared with the
        limits, and a new size is computed for `frames` frames.
        """
        factor = self.factor
        wide, high = round(width / factor) * factor, round(height / factor) * factor
        if counted * wide * high > self.max_pixels:
            scale = math.sqrt(frames * width * height / self.max_pixels)
            wide, high = (max(factor, math.floor(side / scale / factor) * factor) for side in (width, height))
        elif counted * wide * high < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (frames * width * height))
            wide, high = (math.ceil(side * scale / factor) * factor for side in (width, height))
        return wide, high


@dataclass(frozen=True)
class ImageSize:
    """Sizes of an image: original, after resizing, in patches and in tokens."""

    original: tuple[int, int]
    """Width and height of the upright original image, in pixels."""
    normal: tuple[int, int]
    """Width and height of the normal form, in pixels."""
    grid: tuple[int, int, int]
    """Patches of the normal form: 1, number of rows, number of columns. This is the model's image_grid_thw."""
    tokens: int
    """Number of the image's tokens in a prompt."""
    times: tuple[float, ...] = ()
    """Times of a video's frames; always empty for an image."""

    @property
    def shown(self) -> tuple[str, str, str]:
        """Sizes as text to display: the original size, the normal form's size, and "" for the times."""
        return sides(self.original), sides(self.normal), ""

    @classmethod
    def of(cls, width: int, height: int, rule: ImageRule) -> Self:
        """Return the sizes of an image. Raises MediaError if it is too small, too large or too narrow."""
        check_sides(width, height)
        wide, high = rule.resized(width, height)
        grid = (1, high // rule.patch, wide // rule.patch)
        return cls((width, height), (wide, high), grid, wide * high // rule.factor**2)


@dataclass(frozen=True)
class NormalImage:
    """An image in its normal form."""

    kind: ClassVar[str] = IMAGE
    media_type: ClassVar[str] = "image/png"
    content: bytes
    """RGB pixels of the image as PNG, without metadata."""
    sha256: str
    """Hexadecimal SHA-256 of the pixels and the model's rule. The PNG's bytes have no part in the hash, because they
    may differ between versions of Pillow."""
    size: ImageSize


def measure_image(source: Any, rule: ImageRule) -> ImageSize:
    """Return an image's sizes. Most formats need only the file's beginning for this.

    Raises MediaError like `normalise_image`, except for broken pixels.
    """
    with _opened(source) as image:
        width, height = image.size
        lies = image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        return ImageSize.of(*((height, width) if lies else (width, height)), rule)


def normalise_image(source: Any, rule: ImageRule) -> NormalImage:
    """Return an image in its normal form.

    The image is turned upright (EXIF), put on a white background if it is transparent, and resized by bicubic
    interpolation. Grey, palette, CMYK and 16-bit pixels become 8-bit RGB; an animation's first frame counts.

    Args:
        source: an item in one of the forms of `read_source`.
        rule: the model's rule for images.

    Raises:
        MediaError: the image can't be read or decoded, or is too small, too large or too narrow. The message continues
            a sentence that names the item.
    """
    from PIL import Image

    upright = open_upright(source)
    size = ImageSize.of(*upright.size, rule)
    if upright.size != size.normal:
        upright = upright.resize(size.normal, Image.Resampling.BICUBIC)
    pixels = np.asarray(upright)
    return NormalImage(encode_png(pixels), pixels_sha256(pixels, FORM, rule), size)


def open_upright(source: Any) -> "Image":
    """Return an image as 8-bit RGB in its original size, upright and on a white background. Raises like
    `normalise_image`."""
    with _opened(source) as image:
        return _rgb(image)


def sides(size: tuple[int, int]) -> str:
    """Return a width and a height as text, such as "640 x 480"."""
    return f"{size[0]} x {size[1]}"


def check_sides(width: int, height: int) -> None:
    """Check the size of an image or a frame. Raises MediaError if it is too small, too large or too narrow."""
    if min(width, height) < MIN_SIDE:
        raise MediaError(f"is {width} x {height} pixels: each side must have at least {MIN_SIDE}")
    if width * height > MAX_PIXELS:
        raise MediaError(f"is {width} x {height} pixels: at most {MAX_PIXELS:,} are decoded, make it smaller")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise MediaError(f"is {width} x {height} pixels: one side may be at most {MAX_RATIO} times the other")


def encode_png(pixels: np.ndarray) -> bytes:
    """Return RGB pixels, uint8 [height, width, 3], as a PNG without comments and profiles.

    Compresses only runs of equal bytes, in a ninth of the time of Pillow's default, because compression is most of an
    image's cost. Compared with the default, photographs are 5 % smaller, and drawings up to 2.4 times as large, but
    still small.
    """
    from PIL import Image

    stored = io.BytesIO()
    Image.fromarray(pixels).save(stored, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return stored.getvalue()


def decode_png(png: bytes) -> np.ndarray:
    """Return the pixels of an image in normal form, uint8 [height, width, 3], read-only. Raises OSError if it is
    broken."""
    from PIL import Image

    pixels = np.array(Image.open(io.BytesIO(png)))
    pixels.setflags(write=False)
    return pixels


def pixels_sha256(pixels: np.ndarray, form: str, rule: ImageRule) -> str:
    """Return the SHA-256 of RGB pixels, uint8 [height, width, 3], together with their shape, `form` and the model's
    rule."""
    described = json.dumps({"form": form, "shape": pixels.shape, **asdict(rule)}, sort_keys=True)
    return hashlib.sha256(described.encode() + b"\n" + pixels.tobytes()).hexdigest()


@contextmanager
def _opened(source: Any) -> "Iterator[Image]":
    """Open an image after checking format and size in its header. Raises MediaError, also for decoding errors in the
    block."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MediaError("can't be read without the package pillow: pip install 'relaxd[media]'") from error
    content = read_source(source)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            check_sides(*image.size)
            yield image
    except MediaError:
        raise
    except UnidentifiedImageError:
        raise MediaError(f"is no image in a format that is read ({', '.join(FORMATS)}), or is broken") from None
    except Image.DecompressionBombError:
        raise MediaError(f"has more than {MAX_PIXELS:,} pixels, the maximum: make it smaller") from None
    except Exception as error:  # decoders raise almost anything for broken files
        raise MediaError(f"is a broken image: {str(error) or type(error).__name__}") from error


def _rgb(image: "Image") -> "Image":
    """Return an image as 8-bit RGB, turned by its EXIF orientation. Raises MediaError if its value range is unknown."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        return white.convert("RGB")
    if image.mode.startswith("I"):  # Pillow would clip values above 255
        grey = np.asarray(image)
        if grey.min() < 0 or grey.max() > 0xFFFF:
            raise MediaError("has pixels of more than 16 bits: convert it to 8 or 16")
        return Image.fromarray((grey.astype(np.uint32) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise MediaError("has floating-point pixels, whose range nobody knows: convert it to 8 or 16 bits")
    return image.convert("RGB")


SCALE = 1 / 255
"""Factor that scales pixel values (0 to 255) to 0 to 1, as in every supported image processor."""


def cut_patches(pixels: np.ndarray, rule: ImageRule, grid: Grid) -> np.ndarray:
    """Cut an image or video into patches of pixels, uint8 [times x rows x columns, 3, frames of a patch, patch, patch].

    Args:
        pixels: RGB of the normal form, uint8 [height, width, 3]; both sides are multiples of `rule.factor`.
        rule: the model's rule. Patches that form one token are adjacent in the result.
        grid: the item's patches.

    Raises:
        MediaError: the grid doesn't fit the pixels.
    """
    patch, merge = rule.patch, rule.merge
    times, rows, columns = grid
    frames, rest = divmod(pixels.shape[0], times * rows * patch)
    if rest or not frames or pixels.shape[1] != columns * patch:
        raise MediaError(f"has {pixels.shape[1]} x {pixels.shape[0]} pixels, which don't fit its grid {list(grid)}")
    squares = pixels.reshape(times, frames, rows // merge, merge, patch, columns // merge, merge, patch, 3)
    return squares.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(times * rows * columns, 3, frames, patch, patch)


def patches(
    pixels: np.ndarray, rule: ImageRule, grid: Grid, mean: Sequence[float], std: Sequence[float], times: int = 2
) -> np.ndarray:
    """Return the normalised patches of an image or video. Those of an image equal the output of transformers'
    Qwen2VLImageProcessorPil bit for bit.

    Args:
        pixels: as for `cut_patches`.
        rule: the model's rule.
        grid: the item's patches.
        mean: mean of each channel, for values from 0 to 1.
        std: standard deviation of each channel.
        times: number of frames of a patch (temporal_patch_size); an image's frame is repeated.

    Returns:
        float32 [patches, 3 x times x patch x patch].
    """
    cut = cut_patches(pixels, rule, grid)
    # The processor scales in float64, rounds to float32 and normalises there.
    scaled = (cut * SCALE).astype(np.float32)
    normal = (scaled - _by_channel(mean)) / _by_channel(std)
    return np.broadcast_to(normal, (*cut.shape[:2], times, *cut.shape[3:])).reshape(len(cut), -1)


def _by_channel(values: Sequence[float]) -> np.ndarray:
    return np.asarray(values, np.float32)[:, None, None, None]
