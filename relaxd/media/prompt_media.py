"""Media in a group's columns and in requests: records that describe the items, and the items' bytes.

A prompt's media are in the columns prompt_media and media_contents, those of sequences in sequence_media and
sequence_contents.
"""

import base64
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from relaxd.media.images import NormalImage
from relaxd.media.kinds import NormalMedia
from relaxd.media.media_tokens import Grid, Labels, MediaTokens, expand
from relaxd.media.placeholders import AUDIO, IMAGE, VIDEO, shown_text
from relaxd.media.sounds import NormalSound
from relaxd.media.sources import MediaError, data_uri
from relaxd.media.videos import count_frames, own_sound, png_frames
from relaxd.v1 import agent_pb2, rollout_pb2

MediaRecord = Mapping[str, Any]
"""An entry of prompt_media: {"kind": "image", "video" or "audio", "sha256": ..., "grid": [times, rows, columns] or, for
a sound, [frames], "bytes": ...}. The grid of a video with its own sound also has the sound's frames. A video also has
"times", and an item of a sequence "begin", the index of its first token of media."""


MAX_NAMES = 16
"""Maximum number of a prompt's media items that a trace names."""


@dataclass(frozen=True)
class StoredMedia:
    """A media item in its normal form, as it is stored in columns."""

    sha256: str
    """Hash that identifies the item, in hexadecimal digits."""
    grid: Grid
    content: bytes
    """Bytes of a PNG (image or video) or a WAV (sound). A video's own sound follows the PNG as WAV."""
    begin: int | None = None
    """Index of the item's first media token in a sequence; None if unknown."""
    kind: str = IMAGE
    media_type: str = NormalImage.media_type
    times: tuple[float, ...] = ()
    """Times of a video's groups of frames, in seconds from its beginning; empty for other media."""

    @classmethod
    def of(cls, item: NormalMedia) -> Self:
        """Create a stored item from a media item in its normal form."""
        size = item.size
        return cls(item.sha256, size.grid, item.content, None, item.kind, item.media_type, size.times)

    @property
    def uri(self) -> str:
        """The item's bytes as a data URI, for environments and programs."""
        return data_uri(self.content, self.media_type.replace(" ", ""))

    def shifted(self, by: int) -> Self:
        """Return a copy of the item for a sequence in which `by` more tokens come before the item."""
        return replace(self, begin=(self.begin or 0) + by)


def expand_at(
    short: Sequence[int], media: Sequence[StoredMedia], tokens: MediaTokens, labels: Sequence[Labels]
) -> tuple[list[int], list[StoredMedia]]:
    """Replace each media item's single token by all its tokens. Returns the token ids, and the items with `begin` set.

    Args:
        short: ids with one token per item.
        media: the items, in order.
        tokens: the model's tokens for media.
        labels: the items' labels.

    Raises MediaError like `expand`.
    """
    ids = expand(short, [item.grid for item in media], tokens, labels, [item.times for item in media])
    placed, before = [], 0
    places = np.flatnonzero(np.isin(short, list(tokens.modalities))).tolist()
    for place, item, label in zip(places, media, labels, strict=True):
        placed.append(replace(item, begin=place + before + tokens.offset(item.grid, label)))
        before += len(tokens.of_item(item.grid, label, item.times)) - 1
    return ids.tolist(), placed


def to_columns(items: Sequence[NormalMedia]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return a prompt's media as the columns prompt_media and media_contents (uint8). A repeated item is stored
    once."""
    stored: dict[str, bytes] = {}
    records = _records([StoredMedia.of(item) for item in items], stored)
    return records, np.frombuffer(b"".join(stored.values()), np.uint8)


def to_sequence_columns(
    sequences: Sequence[Sequence[StoredMedia]], prompt: Collection[str]
) -> tuple[list[list[dict[str, Any]]], np.ndarray]:
    """Return the media of a group's sequences as the columns sequence_media and sequence_contents (uint8).

    An item is stored once in a group, so those of the prompt aren't stored again.

    Args:
        sequences: media of each sequence with `begin` set, without those of a shared prompt.
        prompt: hashes of the prompt's media.
    """
    stored = dict.fromkeys(prompt, b"")
    records = [_records(media, stored) for media in sequences]
    return records, np.frombuffer(b"".join(stored.values()), np.uint8)


def _records(items: Sequence[StoredMedia], stored: dict[str, bytes]) -> list[dict[str, Any]]:
    """Return the records of media items, and add to `stored` the bytes of items that it lacks, by hash."""
    records = []
    for item in items:
        size = 0 if item.sha256 in stored else len(item.content)
        stored.setdefault(item.sha256, item.content)
        more: dict[str, Any] = {} if item.begin is None else {"begin": item.begin}
        if item.times:
            more["times"] = list(item.times)
        records.append({"kind": item.kind, "sha256": item.sha256, "grid": list(item.grid), "bytes": size, **more})
    return records


def reference_part(item: NormalMedia | StoredMedia) -> dict[str, Any]:
    """Return the message part that refers to an item by its hash."""
    return {"type": item.kind, "uri": f"sha256:{item.sha256}", "media_type": item.media_type, "sha256": item.sha256}


def with_references(
    messages: Sequence[Mapping[str, Any]], media: Sequence[NormalMedia | StoredMedia]
) -> list[dict[str, Any]]:
    """Return a prompt's messages in the form that rewards get (relaxd/media/messages.py): media parts have hashes."""
    rest = iter(media)

    def part(one: Mapping[str, Any]) -> dict[str, Any]:
        if one["type"] == "text":
            return dict(one)
        return reference_part(next(rest))

    return [
        {**message, "content": [part(one) for one in message["content"]]}
        if media and isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]


def without_missing(messages: Sequence[Mapping[str, Any]], known: Collection[str]) -> list[dict[str, Any]]:
    """Return messages in which a text such as <image> replaces each media item whose hash isn't in `known`."""
    found = []
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            is_missing = [part["type"] != "text" and part.get("sha256") not in known for part in content]
            content = [
                {"type": "text", "text": shown_text([part])} if missing else part
                for part, missing in zip(content, is_missing, strict=True)
            ]
        found.append({**message, "content": content})
    return found


def grids_of(records: Sequence[MediaRecord]) -> list[Grid]:
    """Return the size (`Grid`) of each media item, for `lay_out`."""
    return [tuple(map(int, record["grid"])) for record in records]


def times_of(records: Sequence[MediaRecord]) -> list[tuple[float, ...]]:
    """Return each media item's times in seconds, for `lay_out`; empty for an image or a sound."""
    return [tuple(record.get("times", ())) for record in records]


def hashes_of(records: Sequence[MediaRecord]) -> tuple[str, ...]:
    """Return the hashes of a prompt's media. Together with the prompt's tokens they identify the prompt."""
    return tuple(record["sha256"] for record in records)


def names_of(records: Sequence[MediaRecord]) -> list[str]:
    """Return names of a prompt's first MAX_NAMES distinct media items, for traces: KIND:HASH:BYTES, with 12 digits of
    the hash."""
    sizes: dict[tuple[str, str], int] = {}
    for record in records:  # a repeated item's size is in its first record
        sizes.setdefault((record["kind"], record["sha256"][:12]), record["bytes"])
    return [f"{kind}:{digits}:{size}" for (kind, digits), size in list(sizes.items())[:MAX_NAMES]]


def parts_of(name: str, grid: Grid) -> list[tuple[str, Grid]]:
    """Return hash and size of each input that a media item gives to the model's towers: one for most items; for a video
    with sound the frames, then the sound."""
    if len(grid) < 4:
        return [(name, grid)]
    return [(name, grid[:3]), (hashlib.sha256(f"{name}/sound".encode()).hexdigest(), grid[3:])]


def kinds_of(records: Sequence[MediaRecord]) -> dict[str, str]:
    """Return the kind of each input that media items give to the model's towers, by the input's hash (`parts_of`)."""
    found: dict[str, str] = {}
    for record, grid in zip(records, grids_of(records), strict=True):
        found |= zip((name for name, _ in parts_of(record["sha256"], grid)), (record["kind"], AUDIO), strict=False)
    return found


def begins_of(records: Sequence[MediaRecord]) -> list[int] | None:
    """Return the index of each item's first media token, for `lay_out`; None if there are no items or the first item's
    record lacks the index."""
    return [int(record["begin"]) for record in records] if records and "begin" in records[0] else None


def contents_of(records: Sequence[MediaRecord], contents: np.ndarray, column: str = "prompt_media") -> dict[str, bytes]:
    """Return the bytes of media items by hash.

    Raises MediaError if the length of `contents` differs from the sum of the records' lengths. `column` is the
    records' name in errors.
    """
    if (said := sum(record["bytes"] for record in records)) != contents.size:
        raise MediaError(f"has {contents.size} bytes of media, but {column} says {said}")
    found, start = {}, 0
    for record in records:
        if record["bytes"]:
            found[record["sha256"]] = contents[start : start + record["bytes"]].tobytes()
            start += record["bytes"]
    return found


def with_own_sounds(records: Sequence[MediaRecord], contents: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the bytes of media by hash, with each video's own sound as a separate entry (`parts_of`).

    Raises MediaError: a video with its own sound is broken, or the contents lack it.
    """
    found = dict(contents)
    for name, grid in zip(hashes_of(records), grids_of(records), strict=True):
        for sound, _ in parts_of(name, grid)[1:]:
            if name not in contents:
                raise MediaError(f"has no bytes of {VIDEO} {name}")
            found[sound] = own_sound(contents[name])
    return found


def contents_of_group(columns: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the bytes of all media in a group's prompt and sequences, by hash.

    Raises MediaError if the length of the bytes differs from the sum of the records' lengths.
    """
    found = PromptMedia.of_columns(columns).by_hash()
    if (of_sequences := columns.get("sequence_media")) is not None:
        records = [record for one in of_sequences for record in one]
        found |= contents_of(records, columns["sequence_contents"], "sequence_media")
    return found


@dataclass(frozen=True)
class PromptMedia:
    """Media of a prompt, in the form in which requests carry them. Its truth value is False if there are none."""

    records: tuple[MediaRecord, ...] = ()
    """Records of the prompt's media: the content of the column prompt_media."""
    contents: bytes = b""
    """Bytes of the prompt's media: the content of the column media_contents."""

    def __bool__(self) -> bool:
        return bool(self.records)

    @classmethod
    def of(cls, items: Sequence[NormalMedia]) -> "PromptMedia":
        """Create a prompt's media from items in normal form."""
        return cls.of_stored([StoredMedia.of(item) for item in items])

    @classmethod
    def of_stored(cls, items: Sequence[StoredMedia]) -> "PromptMedia":
        """Create a prompt's media from stored items."""
        stored: dict[str, bytes] = {}
        return cls(tuple(_records(items, stored)), b"".join(stored.values()))

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> "PromptMedia":
        """Create a prompt's media from a group's columns; empty if the columns have none."""
        contents = columns.get("media_contents")
        return cls(tuple(columns.get("prompt_media") or ()), contents.tobytes() if contents is not None else b"")

    @classmethod
    def from_proto(cls, message: rollout_pb2.GenerateRequest | agent_pb2.ConverseRequest) -> "PromptMedia":
        """Create a prompt's media from a request to generate or converse."""
        return cls(
            tuple(
                {"kind": one.kind, "sha256": one.sha256, "grid": list(one.grid), "bytes": one.bytes}
                | ({"begin": one.begin} if one.HasField("begin") else {})
                | ({"times": list(one.times)} if one.times else {})
                for one in message.media
            ),
            message.media_contents,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> "PromptMedia":
        """Create a prompt's media from the result of `to_json`; None means no media."""
        return cls(tuple(value["records"]), base64.b64decode(value["contents"])) if value else cls()

    def to_json(self) -> dict[str, Any] | None:
        """Return the prompt's media as JSON for a program's standard input; None if there are none."""
        contents = base64.b64encode(self.contents).decode()
        return {"records": list(self.records), "contents": contents} if self.records else None

    def to_proto(self) -> list[rollout_pb2.PromptMedia]:
        """Convert the media's records to protos."""
        return [rollout_pb2.PromptMedia(**record) for record in self.records]

    def by_hash(self) -> dict[str, bytes]:
        """Return the bytes of the prompt's media by hash. Raises MediaError if their length isn't as recorded."""
        return contents_of(self.records, self.array)

    def items(self) -> list[StoredMedia]:
        """Return the prompt's media items. Raises MediaError if the contents lack an item or don't have the recorded
        length."""
        contents, found = self.by_hash(), []
        for record, grid in zip(self.records, grids_of(self.records), strict=True):
            name, kind = record["sha256"], record["kind"]
            if name not in contents:
                raise MediaError(f"has no bytes of {kind} {name}")
            media_type = _MEDIA_TYPES[kind](contents[name], grid)
            times = tuple(record.get("times", ()))
            found.append(StoredMedia(name, grid, contents[name], record.get("begin"), kind, media_type, times))
        return found

    @property
    def array(self) -> np.ndarray:
        """Bytes of the prompt's media items, one after the other, as uint8 [bytes]."""
        return np.frombuffer(self.contents, np.uint8)


_MEDIA_TYPES: Mapping[str, Callable[[bytes, Grid], str]] = {
    IMAGE: lambda content, grid: NormalImage.media_type,
    VIDEO: lambda content, grid: png_frames(count_frames(content, grid)),
    AUDIO: lambda content, grid: NormalSound.media_type,
}
"""Functions, by kind of media, that return a stored item's MIME type."""
NO_MEDIA = PromptMedia()
