"""A prompt's media as they are stored with its group: what they are (column prompt_media), and their bytes
(media_contents).
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxd.media.layout import Grid
from relaxd.media.sources import MediaError
from relaxd.media.videos import NormalMedia
from relaxd.v1 import rollout_pb2

MediaRecord = Mapping[str, Any]
"""One of prompt_media: {"kind": "image" or "video", "sha256": ..., "grid": [times, rows, columns], "bytes": ...}."""


def to_columns(images: Sequence[NormalMedia]) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return the columns prompt_media and media_contents (uint8). An item that comes twice is stored once."""
    records: list[dict[str, Any]] = []
    stored: dict[str, bytes] = {}
    for image in images:
        size = 0 if image.sha256 in stored else len(image.png)
        stored.setdefault(image.sha256, image.png)
        records.append({"kind": image.kind, "sha256": image.sha256, "grid": list(image.size.grid), "bytes": size})
    return records, np.frombuffer(b"".join(stored.values()), np.uint8)


def with_references(messages: Sequence[Mapping[str, Any]], images: Sequence[NormalMedia]) -> list[dict[str, Any]]:
    """Return messages whose parts say by hash which item is there, as rewards get them (relaxd/media/messages.py)."""
    rest = iter(images)

    def part(one: Mapping[str, Any]) -> dict[str, Any]:
        if one["type"] == "text":
            return dict(one)
        item = next(rest)
        return {
            "type": item.kind,
            "uri": f"sha256:{item.sha256}",
            "media_type": item.media_type,
            "sha256": item.sha256,
        }

    return [
        {**message, "content": [part(one) for one in message["content"]]}
        if images and isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]


def grids_of(records: Sequence[MediaRecord]) -> list[Grid]:
    """Return the patches of a prompt's media, for `lay_out`."""
    return [(int(time), int(rows), int(columns)) for time, rows, columns in (record["grid"] for record in records)]


def hashes_of(records: Sequence[MediaRecord]) -> tuple[str, ...]:
    """Return the hashes of a prompt's media. Together with its tokens they are the prompt's identity."""
    return tuple(record["sha256"] for record in records)


def contents_of(records: Sequence[MediaRecord], contents: np.ndarray) -> dict[str, bytes]:
    """Return the bytes of a prompt's media by their hashes.

    Raises MediaError: the contents aren't as long as the records say.
    """
    if (said := sum(record["bytes"] for record in records)) != contents.size:
        raise MediaError(f"has {contents.size} bytes of media, but prompt_media says {said}")
    found, start = {}, 0
    for record in records:
        if record["bytes"]:
            found[record["sha256"]] = contents[start : start + record["bytes"]].tobytes()
            start += record["bytes"]
    return found


@dataclass(frozen=True)
class PromptMedia:
    """A prompt's media as requests carry them; false if there are none."""

    records: tuple[MediaRecord, ...] = ()
    """As the column prompt_media."""
    contents: bytes = b""
    """As the column media_contents."""

    def __bool__(self) -> bool:
        return bool(self.records)

    @classmethod
    def of(cls, images: Sequence[NormalMedia]) -> "PromptMedia":
        """Return those of items in their normal form."""
        records, contents = to_columns(images)
        return cls(tuple(records), contents.tobytes())

    @classmethod
    def of_columns(cls, columns: Mapping[str, Any]) -> "PromptMedia":
        """Return those of a group's columns, which has none in runs without images."""
        contents = columns.get("media_contents")
        return cls(tuple(columns.get("prompt_media") or ()), contents.tobytes() if contents is not None else b"")

    @classmethod
    def from_proto(cls, message: rollout_pb2.GenerateRequest) -> "PromptMedia":
        """Return those of a request."""
        return cls(
            tuple(
                {"kind": one.kind, "sha256": one.sha256, "grid": list(one.grid), "bytes": one.bytes}
                for one in message.media
            ),
            message.media_contents,
        )

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> "PromptMedia":
        """Read the media from the result of `to_json`. None means that there are no media."""
        return cls(tuple(value["records"]), base64.b64decode(value["contents"])) if value else cls()

    def to_json(self) -> dict[str, Any] | None:
        """Return the media for a program's standard input; None if there are none."""
        contents = base64.b64encode(self.contents).decode()
        return {"records": list(self.records), "contents": contents} if self.records else None

    def to_proto(self) -> list[rollout_pb2.PromptMedia]:
        """Return the messages of the records."""
        return [rollout_pb2.PromptMedia(**record) for record in self.records]

    def by_hash(self) -> dict[str, bytes]:
        """Return the bytes of each by its hash. Raises MediaError."""
        return contents_of(self.records, self.array)

    @property
    def array(self) -> np.ndarray:
        """The contents as uint8 [bytes]."""
        return np.frombuffer(self.contents, np.uint8)


NO_MEDIA = PromptMedia()
