"""Token layout of prompts with media, the same in engine and trainer: expanded ids, modality and positions, in numpy.

A chat template writes one token per item. The model sees one token per merged square of patches, with three positions
(M-RoPE: time, row, column; Qwen2-VL, arXiv 2409.12191). Qwen2.5-VL, Qwen3-VL and Qwen3-Omni lay out images in the same
way. Qwen3-VL (arXiv 2511.21631) lays out a video as a sequence of images, each after a text with its time. Qwen3-Omni
(arXiv 2509.17765) lays out a video as one block, whose positions advance by 13 per second. Its sounds have 13 tokens
per second, with positions like text; a video's own sound is interleaved with the frames by time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from relaxd.media.sources import MediaError

TEXT, IMAGE, VIDEO, AUDIO = 0, 1, 2, 3
"""Modalities of tokens: text, image, video and sound. These are the values of `Layout.modality`."""
NONE = -1
"""Token id that means: the model has no such token."""
Grid = tuple[int, ...]
"""Size of a media item at the input of the model's towers. Image or video: numbers of patches by time (1 for an image),
rows and columns. Sound: number of spectrogram frames, 100 per second. Video with its own sound: the video's three
numbers, then the sound's."""
SECOND_FRAMES, SECOND_TOKENS = 100, 13
"""Number of spectrogram frames per second of sound, and number of tokens per second of sound."""
Labels = Sequence[Sequence[int]]
"""Token ids of the texts that state a video's times, one text before each time. The texts are empty for Qwen3-Omni; an
image or a sound has none."""


@dataclass(frozen=True)
class Run:
    """T consecutive tokens that stand for an image, a sound, a whole video or one time of a video."""

    offsets: np.ndarray
    """Positions of the tokens by time, row and column, relative to the first token's position, float64 [3, T]."""
    advance: int
    """Difference between the position of the token after the run and that of the run's first token."""
    heard: np.ndarray
    """True for each token that stands for sound, bool [T]."""
    rows: np.ndarray
    """Index of each token's row in the towers' output for the run, int64 [T]. Rows of frames come before rows of
    sound."""

    @classmethod
    def of(cls, offsets: np.ndarray, advance: int, *, heard: bool = False) -> Self:
        """Return a run whose tokens are all of frames, or with `heard` all of sound."""
        count = offsets.shape[1]
        return cls(offsets, advance, np.full(count, heard), np.arange(count))

    def __len__(self) -> int:
        """Return the number of tokens in the run."""
        return self.offsets.shape[1]


@dataclass(frozen=True)
class MediaTokens:
    """Ids of the tokens that stand for media in a model's prompts, and how the model lays media out."""

    token: int
    """Id of the token that stands for a part of an image."""
    merge: int
    """Number of patches along each side of the square that one token covers."""
    video: int = NONE
    """Id of the token that stands for a part of a video."""
    start: int = NONE
    """Id of the token before each time of a video; NONE if the model lays out a video as a single block."""
    end: int = NONE
    """Id of the token after each time of a video."""
    audio: int = NONE
    """Id of the token that stands for a part of a sound."""
    sound_start: int = NONE
    """Id of the token before a video with sound."""
    sound_end: int = NONE
    """Id of the token after a video with sound."""
    second: int = 0
    """Number by which positions advance per second of a video that is laid out as a single block."""

    @property
    def modalities(self) -> dict[int, int]:
        """Modalities (IMAGE, VIDEO or AUDIO) of the model's media tokens, by token id."""
        ids = {self.token: IMAGE, self.video: VIDEO, self.audio: AUDIO}
        return {token: modality for token, modality in ids.items() if token != NONE}

    def count(self, grid: Grid) -> int:
        """Return the number of media tokens that stand for an item of this size."""
        if is_sound(grid):
            return sound_tokens(grid[0])
        own = sum(map(sound_tokens, grid[3:]))
        return grid[0] * grid[1] * grid[2] // self.merge**2 + own

    def runs(self, grid: Grid, times: Sequence[float] = ()) -> "list[Run]":
        """Return the runs of consecutive tokens that stand for an item. Between runs there may be text.

        Args:
            grid: the item's size.
            times: a video's times in seconds; needed only for a single-block video.

        Raises:
            MediaError: a single-block video has wrong times or a wrong number of times, or the model doesn't support a
                video's own sound.
        """
        if is_sound(grid):
            count = self.count(grid)
            return [Run.of(_line(count), count, heard=True)]
        rows, columns = grid[1] // self.merge, grid[2] // self.merge
        block = np.stack([np.zeros(rows * columns), *(axis.ravel() for axis in np.indices((rows, columns)))])
        if len(grid) > 3 and not self.second:
            raise MediaError("has a video with its own sound, which this model doesn't hear")
        if (grid[0] == 1 and len(grid) == 3) or not self.second:
            return [Run.of(block, max(rows, columns))] * grid[0]
        if len(times) != grid[0]:
            raise MediaError(f"has a video with the grid {list(grid)}, but {len(times)} times")
        seconds = np.asarray(times, np.float64)
        if seconds[0] != 0 or not np.isfinite(seconds).all() or (np.diff(seconds) < 0).any():
            raise MediaError(f"has a video with the times {list(times)}: they must begin at 0 and never go back")
        starts = np.round(self.second * seconds)
        offsets = np.tile(block, grid[0])
        offsets[0] = np.repeat(starts, rows * columns)
        if len(grid) == 3:
            return [Run.of(offsets, int(offsets.max()) + 1)]
        return [_merged(offsets, _line(sound_tokens(grid[3])))]

    def token_of(self, grid: Grid, labels: Labels) -> int:
        """Return the id of the single token that a chat template writes for an item."""
        return self.audio if is_sound(grid) else self.video if labels else self.token

    def offset(self, grid: Grid, labels: Labels) -> int:
        """Return the index of the first media token among all token ids of an item."""
        return len(labels[0]) + 1 if labels and self.start != NONE else int(len(grid) > 3)

    def of_item(self, grid: Grid, labels: Labels, times: Sequence[float] = ()) -> np.ndarray:
        """Return the T token ids that stand for an item, markers and labels included, int32 [T]. Raises MediaError like
        `runs`."""
        if len(grid) > 3:
            (run,) = self.runs(grid, times)
            marked = [self.sound_start, *np.where(run.heard, self.audio, self.video), self.sound_end]
            return np.array(marked, np.int32)
        if not labels or self.start == NONE:
            return np.full(self.count(grid), self.token_of(grid, labels), np.int32)
        frame = [self.start, *[self.video] * self.count((1, *grid[1:])), self.end]
        return np.array([token for label in labels for token in (*label, *frame)], np.int32)


def is_sound(grid: Grid) -> bool:
    """Return True if `grid` is the size of a sound."""
    return len(grid) == 1


def _line(count: int) -> np.ndarray:
    """Return position offsets that advance by 1 per token, as in text, float64 [3, count]."""
    return np.tile(np.arange(count, dtype=np.float64), (3, 1))


def _merged(seen: np.ndarray, heard: np.ndarray) -> Run:
    """Merge a video and its own sound into one run, ordered by time offset, the video first at equal times.

    As in transformers, the position after the run follows the largest one of its last consecutive tokens of one
    modality.
    """
    offsets = np.concatenate([seen, heard], axis=1)
    rows = np.argsort(offsets[0], kind="stable")
    is_heard = rows >= seen.shape[1]
    last = np.flatnonzero(is_heard != is_heard[-1])[-1] + 1
    return Run(offsets[:, rows], int(offsets[:, rows[last:]].max()) + 1, is_heard, rows)


def sound_tokens(frames: int) -> int:
    """Return the number of tokens of a sound with `frames` spectrogram frames. Three convolutions each halve the number
    of frames in each second, rounding up."""
    seconds, rest = divmod(frames, SECOND_FRAMES)
    return seconds * SECOND_TOKENS + -(-rest // 8)


@dataclass(frozen=True)
class Layout:
    """Layout of the T tokens that the model sees: ids, modalities and positions."""

    tokens: np.ndarray
    """Ids of the T tokens, int32 [T]."""
    modality: np.ndarray
    """Modality of each token: TEXT, IMAGE, VIDEO or AUDIO, uint8 [T]."""
    rows: np.ndarray
    """Index, for each of the M media tokens, of its row in the towers' output for all items, int64 [M]. Rows ascend,
    except in a video with its own sound, where the rows of frames come before those of the sound."""
    positions: np.ndarray
    """Position of each token by time, row and column (M-RoPE), float32 [3, T]."""
    next_position: float
    """Position, on all three axes, of the answer's first token. Answers may sample image tokens, which count as
    text."""


def expand(
    short: Sequence[int] | np.ndarray,
    grids: Sequence[Grid],
    media: MediaTokens,
    labels: Sequence[Labels] = (),
    times: Sequence[Sequence[float]] = (),
) -> np.ndarray:
    """Replace the single token of each media item in a prompt by all tokens of the item.

    Args:
        short: ids with one token per item.
        grids: the items' patches, in the order of the prompt.
        media: the model's tokens for media.
        labels: the items' labels, in the same order; empty if there are only images.
        times: each item's times in seconds, in the same order; empty if no item is a video with its own sound.

    Returns:
        Token ids, int32 [T].

    Raises:
        MediaError: the numbers or the order of tokens and items differ.
    """
    ids, labels, times = np.asarray(short, np.int32), labels or [()] * len(grids), times or [()] * len(grids)
    places = np.flatnonzero(np.isin(ids, list(media.modalities)))
    items = [media.token_of(grid, one) for grid, one in zip(grids, labels, strict=True)]
    for kind, token in (("image", media.token), ("video", media.video), ("sound", media.audio)):
        if (found := int((ids[places] == token).sum())) != (wanted := items.count(token)):
            raise MediaError(
                f"has {found} {kind} tokens (id {token}) for {wanted} {kind}s after templating: the chat template must "
                f"write one for each {kind}, and texts none"
            )
    if ids[places].tolist() != items:
        raise MediaError("has its media in another order after templating: change the chat template")
    pieces, end = [], 0
    for place, grid, label, seconds in zip(places.tolist(), grids, labels, times, strict=True):
        pieces += [ids[end:place], media.of_item(grid, label, seconds)]
        end = place + 1
    return np.concatenate([*pieces, ids[end:]])


def lay_out(
    tokens: np.ndarray,
    grids: Sequence[Grid],
    media: MediaTokens,
    start: float = 0.0,
    *,
    begins: Sequence[int] | None = None,
    times: Sequence[Sequence[float]] = (),
) -> Layout:
    """Return modality and position of each token, for token ids in which media items are expanded.

    An image of h rows and w columns of tokens that begins at p has the positions (p, p + row, p + column), and the next
    token has the position p + max(h, w). Each time of a video is laid out like an image. In a single-block video,
    patches at s seconds have the time position p + 13 s, and the next token follows the largest position. Text and
    sound have equal positions on all axes.

    Args:
        tokens: expanded ids, [T].
        grids: the items' patches, in the order of the prompt.
        media: the model's.
        start: position of the first token, for tokens that follow an answer.
        begins: index of each item's first token of media, for ids that contain answers; None if every token of media
            belongs to an item. Each further time of a video begins with the next token of media.
        times: each item's times in seconds, in the same order; empty if no item is a single-block video.

    Raises:
        MediaError: the tokens of media aren't those of these items.
    """
    if wrong := next((grid for grid in grids if len(grid) not in (1, 3, 4) or min(grid) < 1), None):
        raise MediaError(f"has an item with the grid {list(wrong)}: it must have 1, 3 or 4 numbers of at least 1")
    if wrong := next((grid for grid in grids if any(side % media.merge for side in grid[1:3])), None):
        what = f"its rows and columns must be multiples of the {media.merge} patches that become one token"
        raise MediaError(f"has an item with the grid {list(wrong)}: {what}")
    tokens = np.asarray(tokens, np.int32)
    kinds = np.zeros(len(tokens), np.uint8)
    for token, modality_of_token in media.modalities.items():
        kinds[tokens == token] = modality_of_token
    seconds = times or [()] * len(grids)
    items = [media.runs(grid, own) for grid, own in zip(grids, seconds, strict=True)]
    places = np.flatnonzero(kinds)
    runs = [run for item in items for run in item]
    counts = [len(run) for run in runs]
    if begins is None:
        if len(places) != sum(counts):
            raise MediaError(f"has {len(places)} tokens of media, but its items have {sum(counts)}")
        begins = places[np.cumsum([0, *counts[:-1]])].tolist() if counts else []
    elif len(begins) != len(items):
        raise MediaError(f"has {len(begins)} begins of items, but it has {len(items)} items")
    else:
        begins = [place for item, begin in zip(items, begins, strict=True) for place in _begins(item, begin, places)]
    modality, end = np.zeros(len(tokens), np.uint8), 0
    # Distance from each token's position to the next; an item's first token advances by the whole item.
    advances = np.ones(len(tokens))
    for first, run in zip(begins, runs, strict=True):
        if first < end:
            raise MediaError(f"has an item that begins at token {first}, before token {end}, where the last one ends")
        end = first + len(run)
        own = kinds[first:end]
        kinds_of_frames = np.unique(own[own != AUDIO])
        if len(own) < len(run) or ((own == AUDIO) != run.heard).any() or TEXT in own or len(kinds_of_frames) > 1:
            raise MediaError(f"has other tokens among those of the item that begins at token {first}")
        modality[first:end] = own
        advances[first:end] = 0
        advances[first] = run.advance
    line = start + np.cumsum(advances) - advances
    positions = np.tile(line, (3, 1))
    for first, run in zip(begins, runs, strict=True):
        positions[:, first : first + len(run)] = line[first] + run.offsets
    begin_rows = np.cumsum([0, *counts[:-1]])[: len(runs)]
    numbered = [begin + run.rows for begin, run in zip(begin_rows, runs, strict=True)]
    rows = np.concatenate([np.zeros(0, np.int64), *numbered])
    return Layout(tokens, modality, rows, positions.astype(np.float32), start + float(advances.sum()))


def _begins(item: Sequence[Run], begin: int, places: np.ndarray) -> list[int]:
    """Return for each run of an item the index of the run's first token. Raises MediaError if there is no token left
    for a run.

    Args:
        item: the item's runs.
        begin: index of the first run's first token.
        places: indices of all tokens of media.
    """
    found = [begin]
    for run in item[:-1]:
        behind = int(np.searchsorted(places, found[-1] + len(run)))
        if behind == len(places):
            raise MediaError(f"has no tokens for a time of the video that begins at token {begin}")
        found.append(int(places[behind]))
    return found
