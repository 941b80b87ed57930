"""Images and videos of prompts: in sequences and in packed micro-batches."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA
from relaxd.media import Grid, ImageTokens, MediaCache, lay_out
from relaxd.media.prompt_media import contents_of, grids_of, hashes_of
from services.trainer.megatron.rank_messages import message

KEPT_BYTES = 1 << 30
"""Maximum size of the decoded images that a rank keeps for the passes of a step, in bytes."""


@message
@dataclass(frozen=True)
class Image:
    """An image or a video in its normal form."""

    sha256: str
    """Its identity."""
    grid: Grid
    """Patches by time, row and column."""
    pixels: NDArray[np.uint8]
    """uint8 [height, width, 3]; a video's frames are one below the other."""


@dataclass(frozen=True)
class PromptImages:
    """The images and videos of a prompt of P tokens, and where the model has them."""

    images: tuple[Image, ...]
    """In the order of the prompt."""
    places: NDArray[np.int64]
    """int64 [M]: the prompt's tokens that stand for images. The tower's rows belong to them in order."""
    positions: NDArray[np.float32]
    """float32 [3, P]: positions of the prompt's tokens by time, row and column."""
    next_position: float
    """Position of the first token after the prompt."""

    @classmethod
    def of(cls, prompt: NDArray[np.integer], images: Sequence[Image], tokens: ImageTokens) -> Self:
        """Lay out a prompt with its images.

        Args:
            prompt: expanded token ids, [P].
            images: its images.
            tokens: the model's tokens for images.

        Raises:
            MediaError: the prompt's image tokens aren't those of these images.
        """
        layout = lay_out(prompt, [image.grid for image in images], tokens)
        return cls(tuple(images), np.flatnonzero(layout.modality), layout.positions, layout.next_position)

    def positions_of(self, tokens: int) -> NDArray[np.float32]:
        """Return the positions of a sequence that begins with the prompt, float32 [3, tokens]."""
        rest = np.float32(self.next_position) + np.arange(tokens - self.positions.shape[1], dtype=np.float32)
        return np.concatenate((self.positions, np.tile(rest, (3, 1))), axis=1)


class ImageReader:
    """The images of groups, decoded. Those that were read last are kept."""

    def __init__(self, tokens: ImageTokens) -> None:
        """Make a reader for a model with these tokens for images."""
        self._tokens = tokens
        self._lock = threading.Lock()
        self._cache = MediaCache(KEPT_BYTES)

    @property
    def tokens(self) -> ImageTokens:
        """The model's tokens for images."""
        return self._tokens

    def read(self, columns: Mapping[str, Any]) -> PromptImages | None:
        """Return the images of a group's prompt; None if it has none.

        Args:
            columns: the group's, checked by `check_images`.
        """
        if not (records := columns.get(PROMPT_MEDIA)):
            return None
        with self._lock:
            pixels = self._cache.load(hashes_of(records), lambda _: contents_of(records, columns[MEDIA_CONTENTS]))
        images = [
            Image(sha256, grid, pixels[sha256])
            for sha256, grid in zip(hashes_of(records), grids_of(records), strict=True)
        ]
        return PromptImages.of(columns["prompt_tokens"], images, self._tokens)


def check_images(columns: Mapping[str, Any], tokens: ImageTokens | None) -> None:
    """Check the columns of a group whose prompt may have images.

    Args:
        columns: the group's.
        tokens: the model's tokens for images, which the prompt must have; None: this isn't checked.

    Raises:
        ValueError: they are malformed, don't fit the prompt, or a sequence has a prompt of its own beside them.
    """
    records, contents = columns[PROMPT_MEDIA], columns[MEDIA_CONTENTS]
    if not isinstance(contents, np.ndarray) or contents.dtype != np.uint8 or contents.ndim != 1:
        raise ValueError(f"{MEDIA_CONTENTS} must be an array [bytes] of uint8")
    try:
        grids = grids_of(records)
        known = set(contents_of(records, contents))
        if lacking := next((name for name in hashes_of(records) if name not in known), ""):
            raise ValueError(f"{MEDIA_CONTENTS} has no image {lacking}")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{PROMPT_MEDIA} is malformed: {error!r}") from error
    if not records:
        return
    if not columns["shares_prompt"].all():
        index = int(np.flatnonzero(columns["shares_prompt"] == 0)[0])
        raise ValueError(
            f"sequence {index} begins with a prompt of its own, but the group's prompt has images: relaxd trains only "
            "on answers that continue it"
        )
    if tokens is not None:
        lay_out(columns["prompt_tokens"], grids, tokens)


@message
@dataclass(frozen=True)
class PackedImages:
    """The images of a micro-batch of T tokens, each once."""

    images: tuple[Image, ...]
    """The images, whose rows in the tower's output follow one another."""
    places: NDArray[np.int64]
    """int64 [M]: tokens that stand for images."""
    rows: NDArray[np.int64]
    """int64 [M]: rows of the tower's output that belong to them."""


def pack_images(prompts: Sequence[tuple[int, PromptImages]]) -> PackedImages | None:
    """Return the images of prompts that are stored in a row; None if they have none.

    Args:
        prompts: begin of each stored prompt in the row, and its images.
    """
    first: dict[str, int] = {}
    images: list[Image] = []
    places, rows, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for begin, prompt in prompts:
        places.append(begin + prompt.places)
        patches = sum(int(np.prod(image.grid)) for image in prompt.images)
        for image in prompt.images:
            own = int(np.prod(image.grid)) * len(prompt.places) // patches
            if image.sha256 not in first:
                first[image.sha256] = count
                images.append(image)
                count += own
            rows.append(first[image.sha256] + np.arange(own))
    return PackedImages(tuple(images), np.concatenate(places), np.concatenate(rows)) if images else None
