"""Images, videos and sounds of prompts: a model's rules for media, conversion of media items by these rules, and
conversion of the media of upcoming prompts in threads beside the publisher."""

import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from relaxd.config import DataConfig
from relaxd.data.examples import Example
from relaxd.data.special_tokens import read_object
from relaxd.engines import MODEL_KINDS
from relaxd.media.images import SCALE, ImageRule, cut_patches, patches
from relaxd.media.kinds import MEDIA_KINDS, MediaKind, MediaSize, NormalMedia
from relaxd.media.media_tokens import NONE, SECOND_FRAMES, SECOND_TOKENS, Grid, MediaTokens
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO
from relaxd.media.sounds import SoundRule
from relaxd.media.sources import MediaError, MediaHostAway, RemoteItem, with_hosts
from relaxd.media.videos import BlockRule, VideoRule
from relaxd.models import DataError

SHARED_FILE = "processor_config.json"
"""File of newer models that has the settings of all processors, each under the processor's name."""
PROCESSOR_FILES = ("preprocessor_config.json", SHARED_FILE)
"""Files that may have the settings of a model's image processor, in the order in which they are tried."""
VIDEO_FILES = ("video_preprocessor_config.json", SHARED_FILE)
"""Files that may have the settings of a model's video processor, in the order in which they are tried."""
EXTRACTOR = "WhisperFeatureExtractor"
"""Name of transformers' class that computes the spectrogram of a sound."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""Mean and standard deviation by which Qwen2VLImageProcessor normalises pixels, for models whose settings have none."""
BICUBIC = 3
"""Pillow's constant for bicubic interpolation."""
VIDEO_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}
"""Default settings of Qwen3VLVideoProcessor and Qwen3OmniMoeProcessor."""
POSITIONS_DEFAULT = 25
"""Default of `position_id_per_seconds` of Qwen3OmniMoeThinkerConfig."""


class PromptHostAway(DataError):
    """The media of a prompt can't be fetched, because their host doesn't answer now. It may answer later."""


@dataclass(frozen=True)
class VisionModel:
    """A model's rules for images, videos and sounds."""

    rule: ImageRule
    tokens: MediaTokens
    mean: tuple[float, ...]
    """Mean of each colour channel for normalising pixels, whose values are from 0 to 1."""
    std: tuple[float, ...]
    times: int
    """Number of video frames in a patch. A patch of an image repeats the image as often."""
    video: VideoRule | None = None
    """Rule for videos; None if the run's prompts have no videos."""
    sound: SoundRule | None = None
    """Rule for sounds; None if the model takes no sound, or the run's prompts have none."""
    hosts: tuple[str, ...] = ()
    """Hosts from which the prompts' media items may be fetched (data.media_hosts)."""

    @property
    def rules(self) -> Mapping[str, Any]:
        """Rules by kind of media; a rule is None if the run doesn't use the kind."""
        return {IMAGE: self.rule, VIDEO: self.video, AUDIO: self.sound}

    def cut(self, pixels: np.ndarray, grid: Grid) -> np.ndarray:
        """Cut the pixels of an image or video into patches (`cut_patches`). Raises MediaError if the pixels don't fit
        the grid."""
        found = cut_patches(pixels, self.rule, grid)
        if found.shape[2] not in (1, self.times):
            raise MediaError(f"has {found.shape[2]} frames for each of its times: a video has {self.times}")
        return found

    def heard(self, samples: np.ndarray, grid: Grid) -> np.ndarray:
        """Check the samples of a sound and return them. Raises MediaError if they don't fit the sound's grid, or the
        model takes no sound."""
        if self.sound is None:
            raise MediaError("is a sound, which this model doesn't hear")
        if samples.ndim != 1 or len(samples) // self.sound.hop != grid[0]:
            raise MediaError(f"has {len(samples)} samples, which don't fit its {grid[0]} frames")
        return samples

    def patches(self, pixels: np.ndarray, grid: Grid) -> np.ndarray:
        """Return the normalised patches of an image or video, from its pixels in normal form
        (`relaxd.media.images`)."""
        return patches(pixels, self.rule, grid, self.mean, self.std, self.times)


def read_vision(folder: Path, data: DataConfig | None = None, run_kinds: Collection[str] | None = None) -> VisionModel:
    """Return a model's rules for images, and for videos and sounds if the run has some.

    Args:
        folder: the model's folder.
        data: media columns of the run and limits of media items; None: the model's limits, and sound if the model
            takes it.
        run_kinds: kinds of media in the run; None: the kinds of the columns in `data`.

    Raises:
        DataError: the model takes no such media, relaxd doesn't support its rules, its files are damaged or contradict
            each other, or no item could satisfy the limits.
    """
    config = read_object(folder / "config.json")
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_KINDS:
        raise DataError(
            "model.path",
            f"prompts have media, but {folder} has a model of type {model_type!r}: {', '.join(MODEL_KINDS)} see",
        )
    kinds = MODEL_KINDS[model_type]
    columns = data.media_keys if data is not None else ()
    wanted = columns if run_kinds is None else run_kinds
    for kind in wanted:
        if kind not in kinds:
            able = ", ".join(name for name, own in MODEL_KINDS.items() if kind in own)
            what = f"has a model of type {model_type!r}, which takes no {kind} here: {able} do"
            who = "prompts have {} (data.media_keys)" if kind in columns else "messages may have {} (agent.media)"
            raise DataError("model.path", f"{who.format(kind)}, but {folder} {what}")
    config = config.get("thinker_config", config)
    processor, file = _processor(folder, PROCESSOR_FILES, "image_processor")
    size = processor.get("size") or {}
    try:
        patch, merge = int(processor["patch_size"]), int(processor["merge_size"])
        least = int(processor.get("min_pixels") or size["shortest_edge"])
        most = int(processor.get("max_pixels") or size["longest_edge"])
        vision = config["vision_config"]
        # The configuration may leave out what its class has by default.
        sizes = (int(vision.get("patch_size") or patch), int(vision.get("spatial_merge_size") or merge))
        tokens = MediaTokens(int(config["image_token_id"]), merge)
        if AUDIO in kinds:  # Qwen3-Omni, whose videos are blocks
            names = ("video_token_id", "audio_start_token_id", "audio_end_token_id")
            video, start, end = (int(config.get(name, NONE)) for name in names)
            tokens = replace(tokens, video=video, audio=int(config["audio_token_id"]), second=SECOND_TOKENS)
            tokens = replace(tokens, sound_start=start, sound_end=end)
        elif VIDEO in kinds:
            names = ("video_token_id", "vision_start_token_id", "vision_end_token_id")
            tokens = MediaTokens(tokens.token, merge, *(int(config.get(name, NONE)) for name in names))
        mean, std = (
            tuple(map(float, processor.get(name) or usual))
            for name, usual in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD))
        )
        times = int(processor.get("temporal_patch_size") or 2)
        scale = float(processor.get("rescale_factor") or SCALE)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError("model.path", f"{file} or config.json beside it is damaged: no usable {error}") from error
    if min(patch, merge, least) < 1 or most < least:
        raise DataError("model.path", f"{file} is damaged: sizes {patch}, {merge}, {least}, {most} make no images")
    if (patch, merge) != sizes:
        raise DataError(
            "model.path",
            f"{file} has patches of {patch} pixels, {merge} x {merge} of them a token, but config.json says {sizes}",
        )
    if processor.get("resample", BICUBIC) != BICUBIC or processor.get("do_resize") is False:
        raise DataError("model.path", f"{file} resizes otherwise than by bicubic interpolation, which relaxd doesn't")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0 or times < 1:
        raise DataError("model.path", f"{file} is damaged: mean {mean}, std {std}, temporal_patch_size {times}")
    scaled = (processor.get("do_rescale", True), processor.get("do_normalize", True), abs(scale - SCALE) < 1e-9)
    if not all(scaled):
        raise DataError("model.path", f"{file} doesn't divide pixels by 255 and normalise them, as relaxd does")
    area = (patch * merge) ** 2
    if data is not None:
        least, most = data.min_image_tokens * area or least, data.max_image_tokens * area or most
    if least > most:
        raise DataError(
            "data.max_image_tokens",
            f"is {most / area:g} and data.min_image_tokens {least / area:g} (0 means the model's): the minimum must be "
            "at most the maximum",
        )
    hosts = () if data is None else data.media_hosts
    vision = VisionModel(ImageRule(patch, merge, least, most), tokens, mean, std, times, hosts=hosts)
    if AUDIO in kinds and (data is None or AUDIO in wanted):
        vision = replace(vision, sound=_sound_rule(folder, config, data))
    if data is not None and VIDEO in wanted:
        vision = replace(vision, video=_video_rule(folder, vision, data))
        if tokens.second:
            _check_block(vision, config)
        if data.video_sound:
            if not isinstance(vision.video, BlockRule):
                able = ", ".join(name for name, own in MODEL_KINDS.items() if {VIDEO, AUDIO} <= set(own))
                wrong = f"is true, but {folder} has a model of type {model_type!r}, which hears nothing: {able} does"
                raise DataError("data.video_sound", wrong)
            vision = replace(vision, video=replace(vision.video, sound=_sound_rule(folder, config, data)))
    return vision


def _sound_rule(folder: Path, config: Mapping[str, Any], data: DataConfig | None) -> SoundRule:
    """Return a model's rule for sounds. Raises DataError if the model's files are damaged, contradictory, or have
    unsupported frame rates."""
    extractor, file = _processor(folder, PROCESSOR_FILES, "feature_extractor")
    try:
        seconds = math.inf if data is None else data.max_audio_seconds
        names = ("sampling_rate", "feature_size", "n_fft", "hop_length")
        rule = SoundRule(seconds, *(int(extractor[name]) for name in names))
        audio = config["audio_config"]
        mels, half = int(audio.get("num_mel_bins", rule.mels)), int(audio.get("n_window", SECOND_FRAMES // 2))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError("model.path", f"{file} or config.json beside it is damaged: no usable {error}") from error
    if extractor.get("feature_extractor_type") != EXTRACTOR or extractor.get("dither", 0.0) != 0:
        raise DataError("model.path", f"{file} has no {EXTRACTOR} without dither, which is what relaxd computes")
    if mels != rule.mels:
        raise DataError("model.path", f"{file} makes {rule.mels} bands of a sound, but config.json says {mels}")
    if (2 * half, rule.rate // rule.hop) != (SECOND_FRAMES, SECOND_FRAMES):
        what = f"has {rule.rate / rule.hop:g} frames a second, {2 * half} of which its tower takes at once"
        raise DataError("model.path", f"{folder} {what}: only {SECOND_FRAMES} and {SECOND_FRAMES} are known here")
    return rule


def _video_rule(folder: Path, vision: VisionModel, data: DataConfig) -> VideoRule:
    """Return a model's rule for videos. Raises DataError if the model's files are damaged or contradict each other."""
    is_block = vision.tokens.second > 0
    # Qwen3-Omni's folder has no settings of video, for which transformers, too, reads those of images.
    names = (*VIDEO_FILES, PROCESSOR_FILES[0]) if is_block else VIDEO_FILES
    processor, file = _processor(folder, names, "video_processor")
    images = {
        "patch_size": vision.rule.patch,
        "merge_size": vision.rule.merge,
        "temporal_patch_size": vision.times,
        "image_mean": list(vision.mean),
        "image_std": list(vision.std),
    }
    # Qwen3OmniMoeProcessor gives its video processor its own size, whatever the folder says.
    read = {name for name, value in processor.items() if value is not None} - ({"size"} if is_block else set())
    given = VIDEO_DEFAULTS | {name: processor[name] for name in read}
    if other := next((name for name, value in images.items() if given.get(name, value) != value), ""):
        raise DataError("model.path", f"{file} has {other} {given[other]}, but images have {images[other]}")
    tokens = vision.tokens
    marks = (tokens.sound_start, tokens.sound_end) if data.video_sound else ()
    if NONE in (tokens.video, *(marks if is_block else (tokens.start, tokens.end))):
        raise DataError("model.path", f"{folder / 'config.json'} lacks the ids of the tokens of video")
    try:
        least, most = int(given["size"]["shortest_edge"]), int(given["size"]["longest_edge"])
        fps, fewest = data.video_fps or float(given["fps"]), int(given["min_frames"])
        frames = data.max_video_frames or int(given["max_frames"])
    except (KeyError, TypeError, ValueError) as error:
        raise DataError("model.path", f"{file} is damaged: no usable {error}") from error
    if min(least, fps, fewest, frames) <= 0 or most < least:
        raise DataError("model.path", f"{file} is damaged: sizes {least}, {most}, frames {fewest}, {frames}, {fps} fps")
    total = data.max_video_tokens * vision.times * vision.rule.factor**2
    rule, times = vision.rule, vision.times
    if is_block:
        return BlockRule(rule.patch, rule.merge, least, most, times, fps, min(fewest, frames), frames, total)
    most = total or most
    return VideoRule(rule.patch, rule.merge, min(least, most), most, times, fps, min(fewest, frames), frames, total)


def _check_block(vision: VisionModel, config: Mapping[str, Any]) -> None:
    """Raise DataError unless the positions of a model's videos are whole numbers. For models whose videos are single
    blocks."""
    assert vision.video is not None
    if (said := config.get("position_id_per_seconds", POSITIONS_DEFAULT)) != SECOND_TOKENS:
        what = f"has position_id_per_seconds {said} in its thinker_config: only {SECOND_TOKENS} is known here"
        raise DataError("model.path", f"the model {what}")
    step = vision.tokens.second * vision.times / vision.video.fps
    if abs(step - round(step)) > 1e-9 or step < 1:
        fps = f"{vision.video.fps:g} frames a second"
        usable = ", ".join(f"{vision.tokens.second * vision.times / whole:g}" for whole in (52, 26, 13, 4, 2, 1))
        raise DataError(
            "data.video_fps",
            f"positions of this model's videos grow by {vision.tokens.second} a second, so by {step:g} from one time "
            f"to the next at {fps}: take one that makes this a whole number, such as {usable}",
        )


def _processor(folder: Path, names: tuple[str, ...], kind: str) -> tuple[dict[str, Any], Path]:
    for name in names:
        if (file := folder / name).is_file():
            found = read_object(file)
            if (own := found.get(kind)) or name != SHARED_FILE:
                return own or found, file
    raise DataError(
        "model.path",
        f"{folder} has no settings of its {kind.replace('_', ' ')}: {names[0]} is missing, and so is {kind} in "
        f"{SHARED_FILE}. Copy the files of the published model there, or write them with the save_pretrained of its "
        "processor in transformers",
    )


def unseen(example: Example, kind: str) -> DataError:
    """Return the error for a prompt with a kind of media that data.media_keys doesn't name."""
    setting = f'{{{kind} = "{kind}s"}}'
    what = f"has media of type {kind}, but data.media_keys doesn't say so"
    return DataError("data", f"{example.place} {what}: set data.media_keys = {setting}, or another column")


def measure(example: Example, vision: VisionModel) -> list[MediaSize]:
    """Return the sizes of a prompt's media items, mostly without decoding them. Raises DataError like `normalise`."""
    return _read_each(example, vision, lambda kind: kind.measure)


def normalise(example: Example, vision: VisionModel) -> list[NormalMedia]:
    """Return a prompt's media items in their normal form. Raises DataError, which names the row and the item."""
    return _read_each(example, vision, lambda kind: kind.normalise)


def normalise_shown(kind: str, source: Any, vision: VisionModel | None) -> NormalMedia:
    """Return a media item of a conversation's message in its normal form.

    Raises MediaError if the item can't be used, or the run doesn't use its kind of media.
    """
    if (rule := None if vision is None else vision.rules[kind]) is None:
        raise MediaError(f'is of type {kind}, but agent.media doesn\'t name it: add "{kind}"')
    return MEDIA_KINDS[kind].normalise(source, rule)


def _read_each(
    example: Example, vision: VisionModel, function: Callable[[MediaKind], Callable[[Any, Any], Any]]
) -> list[Any]:
    found = []
    for item in example.media:
        if (rule := vision.rules[item.kind]) is None:
            raise unseen(example, item.kind)
        try:
            found.append(function(MEDIA_KINDS[item.kind])(with_hosts(item.source, vision.hosts), rule))
        except MediaError as error:
            problem = PromptHostAway if isinstance(error, MediaHostAway) else DataError
            raise problem("data", f"{example.place}: {item.place} {error}") from error
    return found


KEPT = 48
"""Maximum number of prompts whose media are kept or being converted: about the current batch and the next two."""
THREADS = min(4, os.cpu_count() or 1)
"""Number of threads that convert upcoming media. Decoding, resizing and PNG encoding release Python's lock."""
DEADLINE_SECONDS = 300
"""Maximum seconds to wait for a prompt's media: a disk may hang, and slow items may be fetched one by one."""


class MediaAhead:
    """Converts the media of upcoming prompts to their normal form in threads, and keeps them by the prompt's index.
    Thread-safe."""

    def __init__(self, vision: VisionModel) -> None:
        self._vision = vision
        self._pool = ThreadPoolExecutor(THREADS, "media")
        self._found: OrderedDict[int, Future[list[NormalMedia]]] = OrderedDict()
        self._awaited: list[int] = []
        """Indices of the prompts that threads wait for in `take`, an entry for each waiting thread."""
        self._lock = RLock()

    def expect(self, examples: Iterable[tuple[int, Example]]) -> None:
        """Start normalising the media of prompts, unless that is done or in progress. Failed prompts are tried again,
        because a file or host may be back."""
        with self._lock:
            for index, example in examples:
                found = self._found.get(index)
                if example.media and (found is None or (found.done() and found.exception() is not None)):
                    self._found[index] = self._pool.submit(normalise, example, self._vision)

    def take(self, index: int, example: Example) -> list[NormalMedia]:
        """Wait for a prompt's media and return them. Discards the oldest media if those of more than KEPT are kept.

        Raises PromptHostAway if a host of the media doesn't answer now, DataError if the media can't be used.
        """
        if not example.media:
            return []
        with self._lock:
            self.expect([(index, example)])
            self._found.move_to_end(index)
            found = self._found[index]
            self._awaited.append(index)
            while len(self._found) > KEPT:
                oldest, dropped = self._found.popitem(last=False)
                if oldest not in self._awaited:
                    dropped.cancel()
        try:
            return found.result(DEADLINE_SECONDS)
        except TimeoutError as error:
            hosts = _hosts(example)
            told = f" from {', '.join(hosts)}" if hosts else ""
            problem = PromptHostAway if hosts else DataError
            raise problem("data", f"{example.place}: its media{told} weren't read in {DEADLINE_SECONDS} s") from error
        finally:
            with self._lock:
                self._awaited.remove(index)


def _hosts(example: Example) -> list[str]:
    """Return the hosts from which a prompt's media are fetched, including frames of videos."""
    sources = [with_hosts(item.source, ()) for item in example.media]
    items = [item for source in sources for item in (source if isinstance(source, list) else [source])]
    return sorted({item.host for item in items if isinstance(item, RemoteItem)})
