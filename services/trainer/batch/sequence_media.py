"""Media of prompts and conversations: in sequences and in packed micro-batches."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from relaxd.board import MEDIA_CONTENTS, PROMPT_MEDIA, SEQUENCE_CONTENTS, SEQUENCE_MEDIA
from relaxd.media.kinds import MediaCache
from relaxd.media.media_tokens import Grid, MediaTokens, lay_out
from relaxd.media.placeholders import AUDIO, IMAGE
from relaxd.media.prompt_media import (
    MediaRecord,
    contents_of,
    contents_of_group,
    grids_of,
    hashes_of,
    kinds_of,
    parts_of,
    times_of,
    with_own_sounds,
)
from relaxd.media.sources import MediaError
from services.trainer.megatron.rank_messages import message

KEPT_BYTES = 1 << 30
"""Maximum size of the decoded media that a rank caches during a step, in bytes."""


@message
@dataclass(frozen=True)
class DecodedItem:
    """Decoded image, video or sound, in its normal form."""

    sha256: str
    """SHA-256 hash that identifies the media item."""
    grid: Grid
    values: NDArray[Any]
    """Pixels, uint8 [height, width, 3], a video's frames stacked vertically; or a sound's samples, int16 [samples]."""
    kind: str = IMAGE
    """Kind of the media item, from `relaxd.media.placeholders.KINDS`."""
    times: tuple[float, ...] = ()
    """Timestamps of a video's frames, in seconds."""
    sound: NDArray[np.int16] | None = None
    """Samples of a video's own sound, int16 [samples]; `grid` then covers frames and sound. None without such sound."""

    def parts(self) -> "list[DecodedItem]":
        """Return the towers' inputs in order; for a video with its own sound, the frames, then the sound."""
        (first, grid), *sounds = parts_of(self.sha256, self.grid)
        found = [replace(self, sha256=first, grid=grid, sound=None)]
        for name, size in sounds:
            assert self.sound is not None
            found.append(DecodedItem(name, size, self.sound, AUDIO))
        return found


@dataclass(frozen=True)
class SequenceMedia:
    """Media in the first P tokens of a sequence, such as its prompt, and these tokens' positions."""

    items: tuple[DecodedItem, ...]
    """Media items in the order of their tokens."""
    places: NDArray[np.int64]
    """Indices in the sequence of the M tokens that stand for media, int64 [M]."""
    rows: NDArray[np.int64]
    """Row of each media token in the towers' outputs, int64 [M]. The outputs of all items follow one another."""
    begins: tuple[int, ...]
    """Index in `places` of each media item's first token."""
    positions: NDArray[np.float32]
    """Positions of the first P tokens in time, row and column, float32 [3, P]."""
    next_position: float
    """Position of the first token after the media's tokens."""

    @classmethod
    def of(
        cls,
        sequence: NDArray[np.integer],
        items: Sequence[DecodedItem],
        tokens: MediaTokens,
        begins: Sequence[int] | None = None,
    ) -> Self:
        """Assign media items to the media tokens of a sequence, and compute the tokens' positions.

        Args:
            sequence: expanded token ids, [P].
            items: their media.
            tokens: the model's tokens for media.
            begins: index of each item's first token; None: all media tokens belong to the items.

        Raises:
            MediaError: the media tokens don't match the items.
        """
        times = [item.times for item in items]
        layout = lay_out(sequence, [item.grid for item in items], tokens, begins=begins, times=times)
        counts = [tokens.count(item.grid) for item in items]
        firsts = tuple(np.cumsum([0, *counts[:-1]]).tolist()) if counts else ()
        places = np.flatnonzero(layout.modality)
        return cls(tuple(items), places, layout.rows, firsts, layout.positions, layout.next_position)

    def positions_of(self, tokens: int) -> NDArray[np.float32]:
        """Return the positions of a sequence of `tokens` tokens in time, row and column, float32 [3, tokens]."""
        rest = np.float32(self.next_position) + np.arange(tokens - self.positions.shape[1], dtype=np.float32)
        return np.concatenate((self.positions, np.tile(rest, (3, 1))), axis=1)

    def hashes_before(self, end: int) -> list[str]:
        """Return the hashes of the media items that begin before token `end`."""
        return [item.sha256 for item, begin in zip(self.items, self.begins, strict=True) if self.places[begin] < end]


class GroupMediaReader:
    """Decodes the media of groups, and caches the most recently decoded items."""

    def __init__(self, tokens: MediaTokens) -> None:
        """`tokens`: the token ids with which the model marks media."""
        self.tokens = tokens
        """Token ids with which the model marks media."""
        self._lock = threading.Lock()
        self._cache = MediaCache(KEPT_BYTES)

    def read(self, columns: Mapping[str, Any]) -> "list[SequenceMedia | None]":
        """Return each sequence's media, including a shared prompt's media; None for a sequence without media.

        Args:
            columns: the group's columns, checked by `check_media`.
        """
        count, of_prompt = len(columns["lengths"]), columns.get(PROMPT_MEDIA) or ()
        of_sequences = columns.get(SEQUENCE_MEDIA) or [()] * count
        records = [*of_prompt, *chain.from_iterable(of_sequences)]
        if not records:
            return [None] * count
        with self._lock:
            values = self._cache.load(kinds_of(records), lambda _: with_own_sounds(records, contents_of_group(columns)))

        def media_of(some: Sequence[MediaRecord]) -> list[DecodedItem]:
            kinds = kinds_of(some)
            found = list(zip(hashes_of(some), grids_of(some), times_of(some), strict=True))
            sounds = {name: values[part] for name, grid, _ in found for part, _ in parts_of(name, grid)[1:]}
            return [
                DecodedItem(name, grid, values[name], kinds[name], times, sounds.get(name))
                for name, grid, times in found
            ]

        prompt = columns["prompt_tokens"]
        shared = SequenceMedia.of(prompt, media_of(of_prompt), self.tokens) if of_prompt else None
        in_prompt = [int(shared.places[begin]) for begin in shared.begins] if shared is not None else []
        found: list[SequenceMedia | None] = []
        bounds = np.cumsum([0, *columns["lengths"]])
        for own, shares, begin, end in zip(of_sequences, columns["shares_prompt"], bounds, bounds[1:], strict=False):
            before, items, begins = (prompt, media_of(of_prompt), in_prompt) if shares else (prompt[:0], [], [])
            if not own:
                found.append(shared if shares else None)
                continue
            sequence = np.concatenate([before, columns["tokens"][begin:end]])
            begins = [*begins, *(len(before) + int(record["begin"]) for record in own)]
            found.append(SequenceMedia.of(sequence, [*items, *media_of(own)], self.tokens, begins))
        return found


def check_media(columns: Mapping[str, Any], tokens: MediaTokens | None) -> None:
    """Check the columns of a group whose prompt or sequences may have media.

    Args:
        columns: the group's columns.
        tokens: the model's tokens for media, which prompt and sequences must have; None: don't check this.

    Raises:
        ValueError: they are malformed, or don't fit the prompt or the sequences.
    """
    known: set[str] = set()
    for name, contents_name in ((PROMPT_MEDIA, MEDIA_CONTENTS), (SEQUENCE_MEDIA, SEQUENCE_CONTENTS)):
        if name not in columns:
            continue
        contents = columns[contents_name]
        if not isinstance(contents, np.ndarray) or contents.dtype != np.uint8 or contents.ndim != 1:
            raise ValueError(f"{contents_name} must be an array [bytes] of uint8")
        try:
            given = columns[name]
            records = [record for one in given for record in one] if name == SEQUENCE_MEDIA else given
            grids_of(records)
            times_of(records)
            known |= set(contents_of(records, contents, name))
            if lacking := next((one for one in hashes_of(records) if one not in known), ""):
                raise ValueError(f"{contents_name} has no item {lacking}")
        except (KeyError, TypeError) as error:
            raise ValueError(f"{name} is malformed: {error!r}") from error
    own_prompts = np.flatnonzero(columns["shares_prompt"] == 0)
    if columns.get(PROMPT_MEDIA) and SEQUENCE_MEDIA not in columns and len(own_prompts):
        raise ValueError(
            f"sequence {own_prompts[0]} begins with a prompt of its own, but the group's prompt has media, and there "
            f"is no column {SEQUENCE_MEDIA}"
        )
    if tokens is None:
        return
    if records := columns.get(PROMPT_MEDIA):
        lay_out(columns["prompt_tokens"], grids_of(records), tokens, times=times_of(records))
    bounds, masks = np.cumsum([0, *columns["lengths"]]), columns["loss_mask"]
    for index, records in enumerate(columns.get(SEQUENCE_MEDIA) or ()):
        if not records:
            continue
        own = slice(int(bounds[index]), int(bounds[index + 1]))
        try:
            begins = [int(record["begin"]) for record in records]
            sizes, times = grids_of(records), times_of(records)
            layout = lay_out(columns["tokens"][own], sizes, tokens, begins=begins, times=times)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{SEQUENCE_MEDIA} is malformed: {error!r}") from error
        except MediaError as error:
            raise ValueError(f"sequence {index} {error}") from error
        if masks[own][layout.modality != 0].any():
            raise ValueError(f"sequence {index} has loss_mask 1 at a token of media, which the model didn't write")


@message
@dataclass(frozen=True)
class PackedMedia:
    """Media of a micro-batch; an item that several sequences share is stored once."""

    items: tuple[DecodedItem, ...]
    """Media items, in the order of their rows in the towers' outputs."""
    places: NDArray[np.int64]
    """Indices in the micro-batch of the M tokens that stand for media, int64 [M]."""
    rows: NDArray[np.int64]
    """Row of each media token in the towers' outputs, int64 [M]."""


def pack_media(sequences: Sequence[tuple[int, int, SequenceMedia]]) -> PackedMedia | None:
    """Return the media of a micro-batch's sequences; None if they have none.

    Args:
        sequences: for each sequence its first token's index in the micro-batch, the number of its first tokens that
            an earlier sequence stores, and its media.
    """
    first: dict[str, int] = {}
    items: list[DecodedItem] = []
    places, rows, count = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for begin, skipped, sequence in sequences:
        of_items = (np.split(column, sequence.begins[1:]) for column in (sequence.places, sequence.rows))
        for item, before, own, own_rows in zip(sequence.items, sequence.begins, *of_items, strict=True):
            if own[0] < skipped:
                continue
            places.append(begin + own - skipped)
            if item.sha256 not in first:
                first[item.sha256] = count
                items += item.parts()
                count += len(own)
            rows.append(first[item.sha256] + own_rows - before)
    return PackedMedia(tuple(items), np.concatenate(places), np.concatenate(rows)) if items else None
