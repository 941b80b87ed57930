"""Images of prompts for one model: its rules, read from its folder, and prompts with their images laid out."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from relaxd.data.examples import Example
from relaxd.data.special_tokens import read_object
from relaxd.media import (
    ImageRule,
    ImageSize,
    ImageTokens,
    MediaError,
    NormalImage,
    measure_image,
    normalise_image,
    patches,
)
from relaxd.media.patches import SCALE
from relaxd.models import DataError

Read = TypeVar("Read")

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of a model's image processor; in the second, which newer models have, under that name."""
MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
"""Models whose layout of images is compared with transformers'."""
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
"""By what Qwen2VLImageProcessor normalises pixels where its settings don't say."""
BICUBIC = 3
"""Number of the interpolation in Pillow."""


@dataclass(frozen=True)
class VisionModel:
    """A model's rules for images."""

    rule: ImageRule
    tokens: ImageTokens
    mean: tuple[float, ...]
    """By which pixels are normalised, of each channel, of values from 0 to 1."""
    std: tuple[float, ...]
    times: int
    """Times that a patch is repeated: the frames of a patch of a video."""

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """Return the patches of an image in its normal form (`relaxd.media.patches`)."""
        return patches(pixels, self.rule, self.mean, self.std, self.times)


def read_vision(folder: Path, min_tokens: int = 0, max_tokens: int = 0) -> VisionModel:
    """Return a model's rules for images.

    Args:
        folder: the model's.
        min_tokens: data.min_image_tokens; 0 for the model's.
        max_tokens: data.max_image_tokens; 0 for the model's.

    Raises:
        DataError: it sees no images, its rules aren't known here, its files are damaged or disagree, or the limits
            exclude each other.
    """
    config = read_object(folder / "config.json")
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise DataError(
            "model.path",
            f"prompts have images, but {folder} has a model of type {kind!r}: {', '.join(MODEL_TYPES)} see",
        )
    processor, file = _processor(folder)
    size = processor.get("size") or {}
    try:
        patch, merge = int(processor["patch_size"]), int(processor["merge_size"])
        least = int(processor.get("min_pixels") or size["shortest_edge"])
        most = int(processor.get("max_pixels") or size["longest_edge"])
        vision = config["vision_config"]
        # The configuration may leave out what its class has by default.
        sizes = (int(vision.get("patch_size") or patch), int(vision.get("spatial_merge_size") or merge))
        token = int(config["image_token_id"])
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
    least, most = min_tokens * area or least, max_tokens * area or most
    if least > most:
        raise DataError(
            "data.max_image_tokens",
            f"is {most / area:g} and data.min_image_tokens {least / area:g} (0 means the model's): the minimum must be "
            "at most the maximum",
        )
    return VisionModel(ImageRule(patch, merge, least, most), ImageTokens(token, merge), mean, std, times)


def _processor(folder: Path) -> tuple[dict[str, Any], Path]:
    for name in PROCESSOR_FILES:
        if (file := folder / name).is_file():
            found = read_object(file)
            return found.get("image_processor", found), file
    raise DataError("model.path", f"{folder} has no settings of an image processor: {PROCESSOR_FILES[0]} is missing")


def measure(example: Example, vision: VisionModel) -> list[ImageSize]:
    """Return the sizes of a prompt's images, without decoding most of them. Raises DataError, as `normalise`."""
    return _read_each(example, lambda source: measure_image(source, vision.rule))


def normalise(example: Example, vision: VisionModel) -> list[NormalImage]:
    """Return a prompt's images in their normal form. Raises DataError, which names the row and the item."""
    return _read_each(example, lambda source: normalise_image(source, vision.rule))


def _read_each(example: Example, read: Callable[[Any], Read]) -> list[Read]:
    found = []
    for item in example.media:
        try:
            found.append(read(item.source))
        except MediaError as error:
            raise DataError("data", f"{example.place}: {item.place} {error}") from error
    return found
