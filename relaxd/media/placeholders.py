"""Takes media items out of prompts: from content parts of messages, and from columns for placeholders in texts."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.media.sources import MediaError

IMAGE, VIDEO, AUDIO = "image", "video", "audio"
KINDS = (IMAGE, VIDEO, AUDIO)
"""Kinds of media that prompts may have."""
PARTS = {
    IMAGE: (IMAGE, ""),
    "image_url": (IMAGE, "url"),
    VIDEO: (VIDEO, ""),
    "video_url": (VIDEO, "url"),
    AUDIO: (AUDIO, ""),
    "audio_url": (AUDIO, "url"),
    "input_audio": (AUDIO, "data"),
}
"""Types of content parts (OpenAI's forms), each with the kind of its media item and a field. The part's field named
like its type has the item itself if the field here is "", else an object with the item in this field."""

Message = dict[str, Any]
Content = str | list[dict[str, Any]] | None
"""A message's content after media were taken out: a text; or, if the message has media, a list of {"type": "text",
"text": ...} for each text and {"type": one of KINDS} for each media item."""


@dataclass(frozen=True)
class MediaItem:
    """A media item of a prompt, not read yet."""

    kind: str
    """Kind of the media item: one of KINDS."""
    source: Any
    """The item as in the data, in one of the forms of `read_source`; a video may also be a list of frames, and a sound
    an array of samples."""
    place: str
    """Place of the item in its data row, for error messages: '"images"[0]' or '"prompt"[0].content[1]'."""


@dataclass
class MediaColumn:
    """Media items in a data row's column, all of one kind. Placeholders in the prompt take the items in order."""

    kind: str
    column: str
    items: Sequence[Any]
    taken: int = 0

    @classmethod
    def of(cls, kind: str, column: str, value: Any) -> "MediaColumn":
        """Create the column from a data row's value: a list of media items, a single item, or None for no items."""
        if value is None:
            value = []
        return cls(kind, column, value if isinstance(value, list | tuple) else [value])

    def take(self, place: str) -> MediaItem:
        """Take the column's next item for the placeholder at `place`. Raises MediaError if no item is left."""
        if self.taken == len(self.items):
            raise MediaError(
                f'{place} has more placeholders of type {self.kind} than "{self.column}" has items '
                f"({len(self.items)}; rows without that column have 0)"
            )
        self.taken += 1
        place = f'"{self.column}"[{self.taken - 1}]'
        return MediaItem(self.kind, self._unpacked(place, self.items[self.taken - 1]), place)

    def _unpacked(self, place: str, item: Any) -> Any:
        """Return a column's item. An item inside an object like a content part, as in verl's data sets, is unpacked."""
        if not isinstance(item, Mapping):
            return item
        fields = {name: one for name, one in item.items() if one is not None}
        kind = str(fields.pop("type", self.kind))
        if kind not in PARTS or PARTS[kind][0] != self.kind:
            raise MediaError(f"{place} is of type {kind}, but its column has items of type {self.kind}")
        name = next((name for name, (kind, _) in PARTS.items() if kind == self.kind and name in fields), "")
        return _item_of_part(place, name, fields) if name else item


class MediaReader:
    """Takes the media items out of a prompt's messages, in order."""

    __slots__ = ("columns", "found")  # every row of a file has one

    def __init__(self, columns: Mapping[str, MediaColumn] | None = None) -> None:
        """Create a reader for one prompt.

        `columns`: the data row's media columns by kind. For kinds without a column, `<image>`, `<video>` and `<audio>`
        are plain text, not placeholders.
        """
        self.columns = columns or {}
        self.found: list[MediaItem] = []

    def content(self, place: str, role: str, content: str | list[Any]) -> Content:
        """Return a message's content without its media items, which are added to `found`. Without items, the content is
        a text.

        Raises MediaError: a part has another type, an item is missing, or the assistant's message has an item.
        """
        if isinstance(content, str) and not self.columns:
            return content
        before = len(self.found)
        parts: list[dict[str, Any]] = []
        for index, part in enumerate([content] if isinstance(content, str) else content):
            inside = place if isinstance(content, str) else f"{place}[{index}]"
            parts += self._parts(inside, {"type": "text", "text": part} if isinstance(part, str) else part)
        if len(self.found) == before:
            return "".join(part["text"] for part in parts)
        if role == "assistant":
            raise MediaError(f"{place} has media in a message of the assistant, which writes text only")
        return parts

    def end(self) -> None:
        """Raise MediaError if a column has items that no placeholder took."""
        for one in self.columns.values():
            if one.taken < len(one.items):
                raise MediaError(
                    f'"{one.column}" has {len(one.items)} items, but the prompt has {one.taken} placeholders '
                    f"<{one.kind}>: there must be as many as items"
                )

    def _parts(self, place: str, part: Any) -> list[dict[str, Any]]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return self._split(place, part["text"])
        if kind not in PARTS:
            shown = f'a part of type "{kind}"' if isinstance(kind, str) else "no part"
            form = '{"type": "text", "text": "..."} or {"type": "image", "image": "..."}'
            raise MediaError(f"{place} is {shown}: there are only text, images, video and sound, as {form}")
        self._take(place, kind, {name: one for name, one in part.items() if name != "type" and one is not None})
        return [{"type": PARTS[kind][0]}]

    def _take(self, place: str, name: str, fields: dict[str, Any]) -> None:
        kind, source = PARTS[name][0], _item_of_part(place, name, fields)
        if source is not None:
            self.found.append(MediaItem(kind, source, place))
        elif kind in self.columns:
            self.found.append(self.columns[kind].take(place))
        else:
            key = f'{{{kind} = "..."}}'
            raise MediaError(f"{place} has no item: add it, or name its column with data.media_keys = {key}")

    def _split(self, place: str, text: str) -> list[dict[str, Any]]:
        """Split a text into content parts at its placeholders, each of which takes an item from its column."""
        parts: list[dict[str, Any]] = []
        # With one group, the odd pieces are the kinds.
        for index, piece in enumerate(re.split(f"<({'|'.join(self.columns)})>", text) if self.columns else [text]):
            if index % 2:
                self.found.append(self.columns[piece].take(place))
                parts.append({"type": piece})
            elif piece:
                parts.append({"type": "text", "text": piece})
        return parts


def _item_of_part(place: str, name: str, fields: dict[str, Any]) -> Any:
    """Return the media item in the fields of a content part of type `name`; None if the part has no item. Raises
    MediaError for unknown fields."""
    kind, inside = PARTS[name]
    source = fields.pop(name, None)
    if fields and fields != {"detail": "auto"}:
        hint = " (data.video_fps and data.max_video_frames are for all videos)" if kind == VIDEO else ""
        what = f"parts of type {name} don't have: leave it out{hint}"
        raise MediaError(f"{place} has {', '.join(map(repr, fields))}, which {what}")
    return source.get(inside) if inside and isinstance(source, dict) else source


def shown_text(content: Content) -> str:
    """Return a message's content as one text, with <image>, <video> or <audio> for each media item."""
    if isinstance(content, list):
        return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)
    return content or ""
