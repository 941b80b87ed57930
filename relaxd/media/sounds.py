"""Sounds in their normal form: one channel of 16-bit samples at the model's rate, stored as WAV.

The hash covers the samples: a decoder or setting that changes the samples changes the hash. PyAV (extra [video]), which
includes FFmpeg, decodes and resamples files. It is imported when the first sound is read.
"""

import hashlib
import io
import json
import wave
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from relaxd.media.media_tokens import sound_tokens
from relaxd.media.placeholders import AUDIO
from relaxd.media.sources import AAC_FRAMES, MP3_FRAMES, MP4_BOXES, MediaError, read_source

if TYPE_CHECKING:
    from av import AudioFrame

FORM = "audio/1"
"""Version of sounds' normal form. It is part of a sound's hash, so another version gives other hashes."""
FORMATS = {
    "wav": "WAV",
    "flac": "FLAC",
    "mp3": "MP3",
    "ogg": "Ogg",
    "aac": "AAC",
    "mp4": "MP4 or QuickTime",
    "matroska": "WebM or Matroska",
}
"""Formats of sound files that are decoded: names for messages, by FFmpeg's names. FFmpeg supports others that open
further files or addresses."""
MIN_RATE, MAX_RATE = 4_000, 384_000
"""Minimum and maximum rate of sounds, in samples per second."""
ARRAY, ARRAY_RATE = "array", "sampling_rate"
"""Field names of a sound that is given as an array of samples, as in the package datasets."""
UNKNOWN_BYTES = 0xFFFFFFFF
"""Size that a WAV file's header gives if the header was written before the size was known."""


@dataclass(frozen=True)
class SoundRule:
    """A model's rule for sounds: sampling rate, spectrogram, and length limit."""

    max_seconds: float
    """Maximum length of a sound in seconds. A longer sound is refused, not cut."""
    rate: int = 16_000
    """Sampling rate of sounds in normal form, in samples per second."""
    mels: int = 128
    """Number of frequency bands of the spectrogram that the audio tower reads."""
    window: int = 400
    """Number of sound samples per spectrogram frame; frames overlap."""
    hop: int = 160
    """Number of sound samples from the start of a spectrogram frame to the start of the next."""


@dataclass(frozen=True)
class SoundSize:
    """Sizes of a sound: original, in normal form, in spectrogram frames and in tokens."""

    original: tuple[int, int]
    """The file's samples per second, and number of channels."""
    samples: int
    """Number of sound samples in the normal form."""
    seconds: float
    grid: tuple[int]
    """Number of frames of the sound's spectrogram."""
    tokens: int
    """Number of the sound's tokens in a prompt."""
    times: tuple[float, ...] = ()
    """Times of a video's frames; always empty for a sound."""

    @classmethod
    def of(cls, rate: int, channels: int, samples: int, rule: SoundRule) -> Self:
        """Return the sizes of a sound with `samples` samples in normal form. Raises MediaError if the sound is too
        short or too long."""
        if samples < rule.window:
            least = f"must have at least {rule.window} at {rule.rate:,} a second"
            raise MediaError(f"has {samples} samples: a sound {least}")
        seconds = samples / rule.rate
        if seconds > rule.max_seconds:
            raise _too_long(rule)
        frames = samples // rule.hop
        return cls((rate, channels), samples, seconds, (frames,), sound_tokens(frames))

    @property
    def shown(self) -> tuple[str, str, str]:
        """Sizes as text to display: the file's rate and channels, the number of samples, and the length."""
        rate, channels = self.original
        original = f"{rate:,} Hz, {channels} channel{'s' * (channels != 1)}"
        return original, f"{self.samples:,} samples", f"{self.seconds:.2f} s"


@dataclass(frozen=True)
class NormalSound:
    """A sound in its normal form."""

    kind: ClassVar[str] = AUDIO
    media_type: ClassVar[str] = "audio/wav"
    content: bytes
    """The sound's samples as WAV, without metadata."""
    sha256: str
    """Hexadecimal SHA-256 of the samples, the normal form's version and the rate."""
    size: SoundSize


def measure_sound(source: Any, rule: SoundRule) -> SoundSize:
    """Return a sound's sizes. Raises MediaError, like `normalise_sound`.

    Decodes the sound, because headers of many formats lack the length.
    """
    return normalise_sound(source, rule).size


def normalise_sound(source: Any, rule: SoundRule) -> NormalSound:
    """Return a sound in its normal form: its channels are mixed, and its rate is changed.

    Args:
        source: an item in one of the forms of `read_source`, or {"array": samples of one channel, from -1 to 1,
            "sampling_rate": samples per second}.
        rule: the model's rule for sound.

    Raises:
        MediaError: the sound can't be read or decoded, has a wrong rate, or is too short or too long. The message
            continues a sentence that names the item.
    """
    given = isinstance(source, Mapping) and source.get(ARRAY) is not None
    return normalise_decoded(_of_array(source) if given else _of_file(read_source(source)), rule)


def normalise_decoded(frames: "Iterator[AudioFrame]", rule: SoundRule) -> NormalSound:
    """Convert the decoded audio frames of a sound to the normal form. Raises MediaError, also for decoding errors."""
    try:
        import av
    except ImportError as error:
        raise MediaError("can't be read without the package av: pip install 'relaxd[video]'") from error
    original, found, left = (0, 0), [np.zeros(0, np.int16)], rule.max_seconds * rule.rate
    try:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=rule.rate)
        for frame in frames:
            original = original if original[0] else _checked(frame)
            for one in resampler.resample(frame):
                found.append(one.to_ndarray()[0])
                left -= one.samples
            if left < 0:  # without decoding the rest
                raise _too_long(rule)
        found += [one.to_ndarray()[0] for one in resampler.resample(None)]
    except MediaError:
        raise
    except Exception as error:  # decoders raise almost anything for broken files
        raise MediaError(f"is a broken sound: {getattr(error, 'strerror', None) or error}") from error
    samples = np.concatenate(found)
    size = SoundSize.of(*original, len(samples), rule)
    return NormalSound(encode_wav(samples, rule.rate), _sha256(samples, rule), size)


def encode_wav(samples: NDArray[np.int16], rate: int) -> bytes:
    """Return a WAV file with one channel of 16-bit samples."""
    stored = io.BytesIO()
    with wave.open(stored, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return stored.getvalue()


def decode_wav(content: bytes) -> NDArray[np.int16]:
    """Return the samples of a sound in normal form, int16, read-only. Raises MediaError if the sound is broken."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            if (file.getnchannels(), file.getsampwidth()) != (1, 2):
                raise MediaError(f"has {file.getnchannels()} channels of {file.getsampwidth()} bytes: it is no sound")
            return np.frombuffer(file.readframes(file.getnframes()), "<i2")
    except (wave.Error, EOFError) as error:
        raise MediaError(f"is a broken sound: {error}") from error


def wav_of_array(source: Mapping[str, Any]) -> bytes:
    """Return an array's samples as WAV, 16 bits each, at their original rate. Raises MediaError, like
    `normalise_sound`."""
    frames = [frame.to_ndarray()[0] for frame in _of_array(source)]
    samples = np.concatenate([np.zeros(0, np.float32), *frames])
    # Converted as FFmpeg does, so that the bits equal those of the same array in data.
    return encode_wav(np.clip((samples * 32768).round(), -32768, 32767).astype(np.int16), source[ARRAY_RATE])


def _of_file(content: bytes) -> "Iterator[AudioFrame]":
    """Yield the decoded audio frames of the first sound in a file. May raise any exception of FFmpeg."""
    import av

    with av.open(io.BytesIO(content), "r", _format_of(content), metadata_errors="replace") as container:
        if not container.streams.audio:
            raise MediaError("is a file without sound")
        yield from container.decode(container.streams.audio[0])


def _of_array(source: Mapping[str, Any]) -> "Iterator[AudioFrame]":
    """Yield all samples of a sound given as an array, as one audio frame. Raises MediaError."""
    import av

    rate = source.get(ARRAY_RATE)
    if not isinstance(rate, int) or isinstance(rate, bool):
        raise MediaError(f'has "{ARRAY_RATE}" {rate!r}: it must be a whole number of samples a second')
    try:
        samples = np.asarray(source[ARRAY], np.float32)
    except (TypeError, ValueError) as error:
        raise MediaError(f'has an "{ARRAY}" that is no list of numbers') from error
    if samples.ndim != 1:
        raise MediaError(f'has an "{ARRAY}" of {samples.ndim} dimensions: it must have one, so mix the channels')
    if not np.isfinite(samples).all() or np.abs(samples).max(initial=0) > 1:
        raise MediaError(f'has an "{ARRAY}" with numbers beyond -1 and 1: divide them by the largest one possible')
    _check_rate(rate)
    if len(samples):
        frame = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
        frame.sample_rate = rate
        yield frame


def _checked(frame: "AudioFrame") -> tuple[int, int]:
    """Return the rate of a sound in samples per second, and the number of its channels. Raises MediaError if the rate
    is out of range."""
    _check_rate(frame.sample_rate)
    return frame.sample_rate, frame.layout.nb_channels


def _check_rate(rate: int) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(f"has {rate:,} samples a second: it must have {MIN_RATE:,} to {MAX_RATE:,}")


def _too_long(rule: SoundRule) -> MediaError:
    return MediaError(f"is longer than data.max_audio_seconds = {rule.max_seconds:g}: cut it, or set a longer maximum")


def _sha256(samples: NDArray[np.int16], rule: SoundRule) -> str:
    described = json.dumps({"form": FORM, "rate": rule.rate}, sort_keys=True)
    return hashlib.sha256(described.encode() + b"\n" + samples.astype("<i2").tobytes()).hexdigest()


def _format_of(content: bytes) -> str:
    """Return FFmpeg's name for the format of a sound file, by the file's first bytes. Raises MediaError."""
    if content.startswith(b"RIFF") and content[8:12] == b"WAVE":
        said = int.from_bytes(content[4:8], "little")
        if len(content) < said + 8 and said != UNKNOWN_BYTES:
            raise MediaError(f"is a broken sound: its file says {said + 8:,} bytes, but has {len(content):,}")
        return "wav"
    if content[4:8] in MP4_BOXES:
        return "mp4"
    first = next((name for beginning, name in _BEGINNINGS.items() if content.startswith(beginning)), None)
    if first is None:
        raise MediaError(f"is no sound in a format that is read ({', '.join(FORMATS.values())}), or is broken")
    return first


_BEGINNINGS = {
    b"fLaC": "flac",
    b"OggS": "ogg",
    b"\x1aE\xdf\xa3": "matroska",
    **dict.fromkeys((b"ID3", *MP3_FRAMES), "mp3"),
    **dict.fromkeys(AAC_FRAMES, "aac"),
}
