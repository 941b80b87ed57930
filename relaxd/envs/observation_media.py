"""Media in environments' observations: conversion from Python forms to the form that is sent.

On the wire a message's content is a text or a list of parts, {"type": "text", "text": ...} and {"type": "image",
"image": a data URI}, the same with "video", which may also be a list of its frames, and "audio". In Python an item may
also be bytes or a path; an image or frame may be a Pillow image, and a sound an array with its sampling rate.
"""

import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from relaxd.media.placeholders import IMAGE, PARTS, Content, MediaItem, MediaReader
from relaxd.media.sounds import ARRAY, wav_of_array
from relaxd.media.sources import MediaError, data_uri, read_source

MAX_MEDIA_BYTES = 32 << 20
"""Maximum total bytes of the media of an observation."""


def is_picture(value: object) -> bool:
    """Return True if a value is a Pillow image, without importing Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_sent(source: object) -> bool:
    """Return True if a media item can be sent: a data URI, or a list of data URIs for a video's frames. Paths can't,
    because they are valid on one machine only."""
    if isinstance(source, list):
        return all(isinstance(one, str) and is_sent(one) for one in source)
    return isinstance(source, str) and source[:5].lower() == "data:"


def content_of_result(result: object) -> Any:
    """Return a function's result as message content: a text, or a list of parts if it has media."""
    several = list(result) if isinstance(result, list | tuple) else [result]
    if not any(is_picture(one) or (isinstance(one, Mapping) and one.get("type") in PARTS) for one in several):
        return str(result)
    return [
        {"type": IMAGE, "image": one} if is_picture(one) else one if isinstance(one, Mapping) else str(one)
        for one in several
    ]


def take_media(place: str, role: str, content: Sequence[Any], *, sent: bool) -> tuple[Content, list[MediaItem]]:
    """Return a message's content without its media, and its media items in the form that is sent.

    Args:
        place: name of the content in errors.
        role: role of the message.
        content: parts of the message; a part may also be a text.
        sent: True for a message of the wire, whose media must be data URIs.

    Raises MediaError: a part is neither text nor an item, or an item can't be read.
    """
    reader = MediaReader()
    left = reader.content(place, role, list(content))
    items = []
    for item in reader.found:
        if sent and not is_sent(item.source):
            raise MediaError(f'{item.place} is no data URI, such as "data:image/png;base64,...", which is sent')
        try:
            items.append(MediaItem(item.kind, item.source if sent else _sent(item.source), item.place))
        except MediaError as error:
            raise MediaError(f"{item.place} {error}") from error
    if sum(_size(item.source) for item in items) > MAX_MEDIA_BYTES * 4 // 3:
        raise MediaError(f"{place} has media of more than {MAX_MEDIA_BYTES >> 20} MiB, the maximum: make them smaller")
    return left, items


def put_media(content: Content, sources: Sequence[Any]) -> Content:
    """Return a message's content with the media items in `sources` filled into its media parts, in order."""
    rest = iter(sources)
    if not isinstance(content, list):
        return content
    return [part if part["type"] == "text" else {"type": part["type"], part["type"]: next(rest)} for part in content]


def with_media(messages: Sequence[Mapping[str, Any]], uris: Sequence[str]) -> list[dict[str, Any]]:
    """Return messages in the form that environments get: each media item is a data URI."""
    rest = iter(uris)
    return [
        {**message, "content": put_media(content, [next(rest) for part in content if part["type"] != "text"])}
        if isinstance(content := message.get("content"), list)
        else dict(message)
        for message in messages
    ]


def _sent(source: Any) -> Any:
    """Convert a media item to a data URI, or a video's frames to a list of data URIs. Raises MediaError."""
    if isinstance(source, list | tuple):
        return [_sent(frame) for frame in source]
    if is_picture(source):
        return data_uri(_png(source))
    if isinstance(source, Mapping) and source.get(ARRAY) is not None:
        return data_uri(wav_of_array(source))
    content = read_source(source)
    return source if is_sent(source) else data_uri(content)


def _size(source: str | list[str]) -> int:
    return len(source) if isinstance(source, str) else sum(map(len, source))


def _png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()
