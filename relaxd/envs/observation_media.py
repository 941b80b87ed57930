"""Images in what environments say: from the forms in which Python has them to those of the wire.

On the wire a message's content is a text or a list of parts, {"type": "text", "text": ...} and {"type": "image",
"image": a data URI}. In Python an image may also be one of Pillow, bytes, or a path.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from relaxd.media import MediaError, MediaItem, MediaReader
from relaxd.media.placeholders import IMAGE, Content
from relaxd.media.sources import data_uri, read_source

MAX_MEDIA_BYTES = 32 << 20
"""Maximum number of bytes of the images of an observation."""


def is_picture(value: object) -> bool:
    """Return True for an image of Pillow, without importing it."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_data_uri(source: object) -> bool:
    """Return True for a data URI, the only form in which images are sent: paths would be of another machine."""
    return isinstance(source, str) and source[:5].lower() == "data:"


def content_of_result(result: object) -> Any:
    """Return a function's result as the content of a message: a text, or a list of parts if it has images."""
    several = list(result) if isinstance(result, list | tuple) else [result]
    if not any(is_picture(one) or (isinstance(one, Mapping) and one.get("type") == IMAGE) for one in several):
        return str(result)
    return [
        {"type": IMAGE, "image": one} if is_picture(one) else one if isinstance(one, Mapping) else str(one)
        for one in several
    ]


def take_media(place: str, role: str, content: Sequence[Any], *, sent: bool) -> tuple[Content, list[MediaItem]]:
    """Return a message's content without its images, and these as data URIs.

    Args:
        place: name of the content in errors.
        role: the message's.
        content: its parts, each of which may also be a text.
        sent: True for a message of the wire, whose images must be data URIs.

    Raises MediaError: a part is no text and no image, or an image can't be read.
    """
    reader = MediaReader()
    left = reader.content(place, role, list(content))
    items = []
    for item in reader.found:
        if item.kind != IMAGE:
            raise MediaError(f"{item.place} is of type {item.kind}: conversations have only images so far")
        source = _png(item.source) if is_picture(item.source) else item.source
        if sent and not is_data_uri(source):
            raise MediaError(f'{item.place} is no data URI, such as "data:image/png;base64,...", which is sent')
        try:
            items.append(MediaItem(item.kind, source if sent else data_uri(read_source(source)), item.place))
        except MediaError as error:
            raise MediaError(f"{item.place} {error}") from error
    if sum(len(item.source) for item in items) > MAX_MEDIA_BYTES * 4 // 3:
        raise MediaError(f"{place} has images of more than {MAX_MEDIA_BYTES >> 20} MiB, the maximum: make them smaller")
    return left, items


def put_media(content: Content, uris: Sequence[str]) -> Content:
    """Return a message's content with an item in each of its images."""
    rest = iter(uris)
    if not isinstance(content, list):
        return content
    return [{"type": IMAGE, "image": next(rest)} if part["type"] == IMAGE else part for part in content]


def with_media(messages: Sequence[Mapping[str, Any]], media: Sequence[bytes]) -> list[dict[str, Any]]:
    """Return messages as environments get them: each image of theirs, whose files are given, as a data URI."""
    uris = iter(map(data_uri, media))
    return [
        {**message, "content": put_media(content, [next(uris) for part in content if part["type"] == IMAGE])}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
