"""Preparation of the media in prompts for the model. The SGLang and transformers engines share it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from relaxd.data.special_tokens import read_object
from relaxd.data.vision import VisionModel, read_vision
from relaxd.engines import ENGINES
from relaxd.media.kinds import MEDIA_KINDS
from relaxd.media.media_tokens import Grid, Layout, is_sound, lay_out
from relaxd.media.prompt_media import (
    begins_of,
    contents_of,
    grids_of,
    hashes_of,
    kinds_of,
    parts_of,
    times_of,
    with_own_sounds,
)
from relaxd.media.sources import MediaError
from services.rollout.engines.request_types import EngineError, Request


def read_model_vision(folder: Path, engine: str) -> VisionModel | None:
    """Return a model's rules for media (sizes, tokens, patches); None if the engine takes no media for this model.

    Raises DataError if the model's files lack these rules, or are damaged.
    """
    return (
        read_vision(folder) if read_object(folder / "config.json").get("model_type") in ENGINES[engine].media else None
    )


@dataclass(frozen=True)
class SeenFrame:
    """An image, or one time step of a video: the vision tower's unit of input."""

    sha256: str
    """Hash that identifies the frame."""
    grid: Grid
    """Grid of the frame's patches: 1, number of rows, number of columns."""
    spans: list[tuple[int, int]]
    """First and last index of each run of the frame's tokens in the prompt."""
    patches: np.ndarray
    """Pixels of the frame's patches, uint8 [patches, 3, frames, side, side], to be normalised on the device."""


@dataclass(frozen=True)
class HeardSound:
    """A sound in a prompt."""

    sha256: str
    """Hash that identifies the sound."""
    spans: list[tuple[int, int]]
    """First and last index of each run of the sound's tokens in the prompt. A video's sound has several runs."""
    samples: np.ndarray
    """Amplitudes of the sound, int16 [samples]."""


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt whose media are ready for the model."""

    vision: VisionModel
    """The model's rules for media: sizes, tokens and patches."""
    layout: Layout
    hashes: tuple[str, ...]
    """SHA-256 hash of each medium, in prompt order."""
    grids: Sequence[Grid]
    """Grid of each medium, in prompt order."""
    patches: dict[str, np.ndarray]
    """Patches of each image and video, by hash: uint8 [patches, 3, frames, side, side], to be normalised on the
    device."""
    sounds: dict[str, np.ndarray] = field(default_factory=dict)
    """Amplitudes of each sound, by hash: int16 [samples]."""

    @property
    def offset(self) -> int:
        """Position that the first token after the prompt gets, minus that token's index in the sequence."""
        return int(self.layout.next_position) - len(self.layout.tokens)

    @property
    def parts(self) -> list[tuple[str, Grid]]:
        """Hash and grid of each input of the vision and audio towers, in prompt order (see `parts_of`)."""
        return [part for name, grid in zip(self.hashes, self.grids, strict=True) for part in parts_of(name, grid)]

    @property
    def items(self) -> list[SeenFrame | HeardSound]:
        """Images, time steps of videos, and sounds, in prompt order; a video's own sound follows the video."""
        count = self.vision.tokens.count
        counts = [[count(grid)] if is_sound(grid) else [count((1, *grid[1:]))] * grid[0] for _, grid in self.parts]
        ends = np.cumsum([one for item in counts for one in item])
        by_row = np.flatnonzero(self.layout.modality)[np.argsort(self.layout.rows)]
        spans = map(_spans, np.split(by_row, ends[:-1]))
        found: list[SeenFrame | HeardSound] = []
        for name, grid in self.parts:
            if is_sound(grid):
                found.append(HeardSound(name, next(spans), self.sounds[name]))
                continue
            for number, cut in enumerate(np.split(self.patches[name], grid[0])):
                own = hashlib.sha256(f"{name}/{number}".encode()).hexdigest()
                found.append(SeenFrame(own, (1, *grid[1:]), next(spans), cut))
        return found

    def positions(self, more: int) -> np.ndarray:
        """Return the positions of the prompt's T tokens and of `more` tokens after the prompt, int64 [3, T + more]."""
        behind = np.tile(int(self.layout.next_position) + np.arange(more), (3, 1))
        return np.concatenate([self.layout.positions.astype(np.int64), behind], axis=1)

    @property
    def identity(self) -> str:
        """Hash of all media in the prompt. Prompts with the same tokens and the same identity are equal."""
        return hashlib.sha256("/".join(self.hashes).encode()).hexdigest()


def _spans(places: np.ndarray) -> list[tuple[int, int]]:
    """Return the first and last index of each run of consecutive indices."""
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return [(int(run[0]), int(run[-1])) for run in runs]


def see(request: Request, vision: VisionModel | None) -> SeenPrompt | None:
    """Return a request's prompt with its media prepared for the model; None if it has no media. Raises EngineError if
    the model takes no media, or if the media are unusable or don't match the prompt.
    """
    media = request.media
    if not media:
        return None
    if vision is None:
        raise EngineError("the prompt has media, but the model takes none")
    grids, hashes = grids_of(media.records), hashes_of(media.records)
    try:
        tokens, begins = np.asarray(request.prompt_tokens, np.int32), begins_of(media.records)
        layout = lay_out(tokens, grids, vision.tokens, begins=begins, times=times_of(media.records))
        stored = with_own_sounds(media.records, contents_of(media.records, media.array))
        sizes = dict(part for name, grid in zip(hashes, grids, strict=True) for part in parts_of(name, grid))
        opened = {name: MEDIA_KINDS[kind].open(stored[name]) for name, kind in kinds_of(media.records).items()}
        patches = {name: vision.cut(opened[name], grid) for name, grid in sizes.items() if not is_sound(grid)}
        sounds = {name: vision.heard(opened[name], grid) for name, grid in sizes.items() if is_sound(grid)}
    except (MediaError, KeyError, OSError, ValueError) as error:
        raise EngineError(f"the prompt's media can't be used: {error}") from error
    return SeenPrompt(vision, layout, hashes, grids, patches, sounds)
