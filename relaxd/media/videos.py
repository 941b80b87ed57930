"""Videos in their normal form: sampled frames, upright RGB in the size by the model's rule, in one PNG.

The frames are stacked vertically, so readers of normal images can read them, too. The hash covers the pixels: a decoder
or setting that changes pixels changes the hash. Files need PyAV (extra [video]), which includes FFmpeg and is imported
when the first file is read.
"""

import hashlib
import io
import struct
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np

from relaxd.media.images import (
    ImageRule,
    check_sides,
    encode_png,
    open_upright,
    pixels_sha256,
    sides,
)
from relaxd.media.placeholders import VIDEO
from relaxd.media.sounds import NormalSound, SoundRule, SoundSize, normalise_decoded
from relaxd.media.sources import MP4_BOXES, MediaError, read_source

if TYPE_CHECKING:
    from av.container import InputContainer
    from PIL.Image import Image

FORM = "video/1"
"""Version of videos' normal form. It is part of a video's hash, so another version gives other hashes."""
FORMATS = {"mp4": "MP4 or QuickTime", "matroska": "WebM or Matroska", "avi": "AVI", "gif": "GIF"}
"""Formats of video files that are decoded: names for messages, by FFmpeg's names. FFmpeg supports others that open
further files or addresses."""
MIN_FRAMES = 2
"""Minimum number of frames of a video; a single frame is an image."""
MAX_FRAMES = 1 << 17
"""Maximum number of frames of a video before sampling: over an hour at 30 frames per second."""


@dataclass(frozen=True)
class VideoRule(ImageRule):
    """A model's rule for video. The pixel limits are for all sampled frames together."""

    times: int
    """Number of consecutive sampled frames that form a group, which the model sees as one time."""
    fps: float
    """Number of frames to sample per second of video."""
    min_frames: int
    max_frames: int
    total_pixels: int = 0
    """Maximum pixels of all sampled frames together, set by data.max_video_tokens. 0: only the model's limits hold."""

    def frame_limit(self, frames: int) -> int:
        """Return the maximum number of frames to sample from a video of `frames` frames."""
        affordable = self.total_pixels // self.factor**2 or frames  # each frame has at least one token
        return min(self.max_frames, frames, affordable)

    def within_total(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of sampled frames, reduced if a frame exceeds its share of `total_pixels`.

        Models' own rules can exceed the share: they round enlarged sizes up, don't count an odd last frame, and keep
        narrow frames at least one token wide.
        """
        share = self.total_pixels // (-(-frames // self.times) * self.times)
        while self.total_pixels and width * height > share and max(width, height) > self.factor:
            width, height = (width - self.factor, height) if width > height else (width, height - self.factor)
        return width, height

    def sampled(self, frames: int, rate: float) -> list[int]:
        """Return the indices of the sampled frames, as Qwen3-VL's processor in transformers does.

        The sampled frames are evenly spread from the first to the last frame: `fps` per second, within the limits.
        """
        wanted = min(max(int(frames / rate * self.fps), self.min_frames), self.frame_limit(frames))
        indices: list[int] = np.linspace(0, frames - 1, wanted).round().astype(int).tolist()
        return indices

    def resized_frames(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of resized frames: `smart_resize` of Qwen3-VL's video processor."""
        if min(width, height) < self.factor:
            scale = max(self.factor / height, self.factor / width)
            width, height = int(width * scale), int(height * scale)
        resized = self.resized(width, height, frames, round(frames / self.times) * self.times)
        return self.within_total(frames, *resized)

    def seconds(self, sampled: Sequence[int], rate: float) -> tuple[float, ...]:
        """Return the time of each group of `times` sampled frames, in seconds: the mean of its first and last
        frame's."""
        each = [index / rate for index in sampled]
        pairs = zip(each[:: self.times], each[self.times - 1 :: self.times], strict=True)
        return tuple((first + last) / 2 for first, last in pairs)


@dataclass(frozen=True)
class BlockRule(VideoRule):
    """Qwen3-Omni's rule for video, as in transformers' Qwen2VLVideoProcessor. The pixel limits are for each frame."""

    sound: SoundRule | None = None
    """Model's rule for a video's own sound; None: the sound is dropped."""

    def sampled(self, frames: int, rate: float) -> list[int]:
        """Return the indices of the sampled frames. Their number is a multiple of `times`; the last frame isn't
        sampled."""
        most = self.frame_limit(frames) // self.times * self.times
        wanted = int(min(max(frames / rate * self.fps, self.min_frames), most) // self.times) * self.times or 1
        # transformers computes them in float32.
        indices: list[int] = (np.arange(wanted) * (frames / wanted)).astype(np.float32).astype(int).tolist()
        return indices

    def resized_frames(self, frames: int, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of resized frames: `smart_resize` of images, within a frame's share of
        `total_pixels`."""
        if not self.total_pixels:
            return self.resized(width, height)
        share = self.total_pixels // (-(-frames // self.times) * self.times)
        most = min(self.max_pixels, share)
        resized = replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most).resized(width, height)
        return self.within_total(frames, *resized)

    def seconds(self, sampled: Sequence[int], rate: float) -> tuple[float, ...]:
        """Return the time of each group of `times` sampled frames, in seconds. As in transformers, times are computed
        as if `fps` frames per second were sampled, even if limits changed the number."""
        return tuple(time * self.times / self.fps for time in range(len(sampled) // self.times))


@dataclass(frozen=True)
class VideoSize:
    """Sizes of a video: original, in normal form, in patches and in tokens, and its sampled frames."""

    original: tuple[int, int]
    """Width and height of an upright original frame, in pixels."""
    normal: tuple[int, int]
    """Width and height of a frame in the normal form, in pixels."""
    grid: tuple[int, ...]
    """Numbers of patches of the normal form: times, rows, columns, as in the model's video_grid_thw. If the video has
    its own sound, also the number of the sound's spectrogram frames."""
    tokens: int
    """Number of tokens in a prompt that stand for frames and sound. The texts with times don't count."""
    times: tuple[float, ...]
    """Time in seconds of each group of frames that the model sees as one."""
    sampled: tuple[int, ...]
    """Indices of the sampled frames. The last index is repeated to fill the last group of frames."""

    @property
    def shown(self) -> tuple[str, str, str]:
        """Sizes as text to display: size of the original frames, size of the normal form's frames, and times."""
        when = f"{len(self.times)}: {self.times[0]:.1f} to {self.times[-1]:.1f} s"
        return sides(self.original), sides(self.normal), when + (" with sound" if len(self.grid) > 3 else "")

    @classmethod
    def of(
        cls, width: int, height: int, frames: int, rate: float, rule: VideoRule, sound: SoundSize | None = None
    ) -> Self:
        """Return the sizes of a video and its sound.

        Raises MediaError: the video has too many or too few frames, or their size is wrong.
        """
        check_sides(width, height)
        if frames < MIN_FRAMES:
            raise MediaError(f"has too few frames ({frames}): a video must have at least {MIN_FRAMES}")
        if frames > MAX_FRAMES:
            raise MediaError(f"has {frames:,} frames: at most {MAX_FRAMES:,} are read, cut it into parts")
        sampled = rule.sampled(frames, rate)
        wide, high = rule.resized_frames(len(sampled), width, height)
        sampled += sampled[-1:] * (-len(sampled) % rule.times)
        times = rule.seconds(sampled, rate)
        grid: tuple[int, ...] = (len(times), high // rule.patch, wide // rule.patch)
        tokens = len(times) * wide * high // rule.factor**2
        if sound is not None:
            grid, tokens = grid + sound.grid, tokens + sound.tokens
        return cls((width, height), (wide, high), grid, tokens, times, tuple(sampled))


@dataclass(frozen=True)
class NormalVideo:
    """A video in its normal form."""

    kind: ClassVar[str] = VIDEO
    content: bytes
    """RGB pixels of the frames, one below the other, as PNG without metadata. The video's own sound, if it is kept,
    follows as WAV, which PNG readers ignore."""
    sha256: str
    """Hexadecimal SHA-256 of the pixels, the model's sampling and sizing rule, and the video's own sound if kept."""
    size: VideoSize

    @property
    def media_type(self) -> str:
        """MIME type of the PNG, with the number of frames as a parameter."""
        return png_frames(len(self.size.sampled))


def measure_video(source: Any, rule: VideoRule) -> VideoSize:
    """Return a video's sizes. Reads the whole file, but decodes only one frame, and the sound if it is kept.

    Raises MediaError like `normalise_video`, except for damage after the first frame.
    """
    with _opened(source, rule) as clip:
        sound = clip.sound(rule)
        return VideoSize.of(*clip.size, clip.frames, clip.rate, rule, None if sound is None else sound.size)


def normalise_video(source: Any, rule: VideoRule) -> NormalVideo:
    """Return a video in its normal form.

    Its frames are sampled, turned upright and resized by bicubic interpolation.

    Args:
        source: an item in one of the forms of `read_source`, or a list of frames in these forms, with an assumed rate
            of `rule.fps` frames per second.
        rule: the model's rule for video.

    Raises:
        MediaError: the video can't be read or decoded, or has too many, too few, too small, too large or too narrow
            frames. The message continues a sentence that names the item.
    """
    from PIL import Image

    with _opened(source, rule) as clip:
        sound = clip.sound(rule)
        size = VideoSize.of(*clip.size, clip.frames, clip.rate, rule, None if sound is None else sound.size)
        found = {}
        for index, frame in clip.read(set(size.sampled)):
            if frame.size != clip.size:
                raise MediaError(f"has frames of different sizes: {size.original} and, at {index}, {frame.size}")
            resized = frame if frame.size == size.normal else frame.resize(size.normal, Image.Resampling.BICUBIC)
            found[index] = np.asarray(resized)
    if lacking := sorted(set(size.sampled) - found.keys()):
        raise MediaError(f"is a broken video: its file has {clip.frames} frames, but frame {lacking[0]} isn't decoded")
    pixels = np.concatenate([found[index] for index in size.sampled])
    name = pixels_sha256(pixels, FORM, rule)
    content = encode_png(pixels)
    if sound is not None:
        name, content = hashlib.sha256(f"{name}/{sound.sha256}".encode()).hexdigest(), content + sound.content
    return NormalVideo(content, name, size)


def own_sound(content: bytes) -> bytes:
    """Return the WAV of a video's own sound from the normal form. Raises MediaError if it is broken."""
    place = 8  # index of the first chunk, after PNG's signature
    while place + 8 <= len(content):
        length, name = struct.unpack(">I4s", content[place : place + 8])
        place += length + 12
        if name == b"IEND":
            return content[place:]
    raise MediaError("is a broken video: its PNG has no end")


def png_frames(count: int) -> str:
    """Return the MIME type of a PNG that has `count` frames of a video."""
    return f"image/png; frames={count}"


def count_frames(content: bytes, grid: Sequence[int]) -> int:
    """Return the number of frames of an image or video in normal form, from its PNG's header and its grid."""
    width, height = struct.unpack(">II", content[16:24])
    _, rows, columns = grid[:3]
    return int(height // (rows * width // columns))  # patches are squares


def frames_of(image: "Image", count: int) -> "list[Image]":
    """Return the frames of a video from its normal form, an image with one frame below the other."""
    height = image.height // count
    return [image.crop((0, top, image.width, top + height)) for top in range(0, image.height, height)]


class _Clip(Protocol):
    """Interface of an opened video, which is a file or a list of frames."""

    frames: int
    """Number of frames of the video."""
    rate: float
    """Number of frames per second of the video."""
    size: tuple[int, int]
    """Width and height of an upright frame, in pixels."""

    def read(self, wanted: Collection[int]) -> "Iterator[tuple[int, Image]]":
        """Yield the index and the upright RGB image of each wanted frame. May raise any exception."""

    def sound(self, rule: VideoRule) -> NormalSound | None:
        """Return the video's own sound; None if it has no samples or the rule drops it. Raises MediaError."""


@contextmanager
def _opened(source: Any, rule: VideoRule) -> Iterator[_Clip]:
    """Open a video given as a file or as a list of frames. Raises MediaError, also for decoding errors in the block."""
    if isinstance(source, list | tuple):
        yield _FrameList(source, rule.fps)
        return
    content = read_source(source)
    try:
        yield _File(content)
    except MediaError:
        raise
    except Exception as error:  # decoders raise almost anything for broken files
        raise MediaError(f"is a broken video: {getattr(error, 'strerror', None) or error}") from error


class _FrameList:
    """A video given as a list of images."""

    def __init__(self, sources: Sequence[Any], rate: float) -> None:
        self._sources = sources
        self.frames, self.rate = len(sources), rate
        if not sources:
            raise MediaError("is an empty list: a video has frames")
        self.size = self._frame(0).size

    def read(self, wanted: Collection[int]) -> "Iterator[tuple[int, Image]]":
        for index in sorted(wanted):
            yield index, self._frame(index)

    def sound(self, rule: VideoRule) -> NormalSound | None:
        return None

    def _frame(self, index: int) -> "Image":
        try:
            return open_upright(self._sources[index])
        except MediaError as error:
            raise MediaError(f"has a wrong frame: frame {index} {error}") from error


class _File:
    """A video given as a file's content."""

    def __init__(self, content: bytes) -> None:
        self._content, self._format = content, _format_of(content)
        with self._container() as container:
            stream = container.streams.video[0]
            width, height = stream.codec_context.width, stream.codec_context.height
            if not width or not height:
                raise MediaError("is a broken video: its file doesn't say how large it is")
            check_sides(width, height)
            rate = stream.average_rate or stream.guessed_rate
            if not rate:
                raise MediaError("is a video that doesn't say how many frames a second has")
            self.rate = float(rate)
            stored = self.frames = 0
            for packet in container.demux(stream):
                stored += packet.size > 0
                self.frames += packet.size > 0 and not packet.is_discard
            if stored < stream.frames:
                raise MediaError(f"is a broken video: it says {stream.frames} frames, but has only {stored}")
        if not self.frames:
            raise MediaError("is a video without frames")
        first = next((frame for _, frame in self.read([0])), None)
        if first is None:
            raise MediaError("is a broken video: its first frame isn't decoded")
        self.size = first.size

    def read(self, wanted: Collection[int]) -> "Iterator[tuple[int, Image]]":
        with self._container() as container:
            for index, frame in enumerate(container.decode(container.streams.video[0])):
                if index in wanted:
                    yield index, frame.to_image().rotate(frame.rotation, expand=True)
                if index == max(wanted):
                    return

    def sound(self, rule: VideoRule) -> NormalSound | None:
        if not isinstance(rule, BlockRule) or rule.sound is None:
            return None
        with self._container() as container:
            frames = container.decode(container.streams.audio[0]) if container.streams.audio else iter(())
            if (first := next(frames, None)) is None:
                return None
            try:
                return normalise_decoded(chain([first], frames), rule.sound)
            except MediaError as error:
                raise MediaError(f"is a video whose own sound {error}") from error

    def _container(self) -> "InputContainer":
        try:
            import av
        except ImportError as error:
            raise MediaError("can't be read without the package av: pip install 'relaxd[video]'") from error
        container = av.open(io.BytesIO(self._content), "r", self._format, metadata_errors="replace")
        if not container.streams.video:
            container.close()
            raise MediaError("is a file without video")
        return container


def _format_of(content: bytes) -> str:
    """Return FFmpeg's name for the format of a video file, by the file's first bytes. Raises MediaError."""
    if content[4:8] in MP4_BOXES:
        return "mp4"
    if content.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if content.startswith(b"RIFF") and content[8:12] == b"AVI ":
        return "avi"
    if content.startswith(b"GIF8"):
        return "gif"
    raise MediaError(f"is no video in a format that is read ({', '.join(FORMATS.values())}), or is broken")
