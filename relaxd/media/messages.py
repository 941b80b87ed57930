"""Messages of conversations: conversion between protos and the form that rewards get.

Also extracts the text between tags such as <answer>, and removes thinking from responses.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from relaxd.v1 import content_pb2

Message = dict[str, Any]
"""A message in the form that rewards get: {"role": "user", "content": [part, ...]}. A part is {"type": "text", "text":
...}, or media by reference: {"type": "image" | "audio" | "video", "uri": ..., "media_type": "image/png", "sha256":
hexadecimal digits or ""}."""


def text_message(role: str, text: str) -> Message:
    """Return a message with `text` as its only part."""
    return {"role": role, "content": [{"type": "text", "text": text}]}


def to_proto(messages: Iterable[Mapping[str, Any]]) -> list[content_pb2.Message]:
    """Convert messages to protos. A message's content may also be a plain text, as in chat data."""
    return [
        content_pb2.Message(role=message["role"], content=map(_part_to_proto, _parts(message["content"])))
        for message in messages
    ]


def from_proto(messages: Iterable[content_pb2.Message]) -> list[Message]:
    """Convert protos to messages. Each content part in the protos must be set."""
    return [{"role": message.role, "content": [_part(part) for part in message.content]} for message in messages]


_OTHERS = ("user", "tool", "system")
"""Roles of messages that a model doesn't write."""


def text_and_media(messages: Sequence[content_pb2.Message], role: str) -> tuple[str, tuple[Message, ...]]:
    """Return the text of a prompt or an answer, and its messages, or () if they are only that text by `role`.

    A prompt (role "user") has its text in the last message that isn't the assistant's, because a final assistant
    message begins the answer. An answer has its text in the assistant's last message; other messages are an
    environment's.
    """
    if not messages:
        return "", ()
    if role == "user":
        said = next((one for one in reversed(messages) if one.role != "assistant"), messages[-1])
    else:
        said = next((one for one in reversed(messages) if one.role not in _OTHERS), content_pb2.Message())
    text = "\n".join(part.text for part in said.content if part.HasField("text"))
    found = tuple(from_proto(messages))
    return text, () if found in ((text_message("", text),), (text_message(role, text),)) else found


def with_parts(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages with each content as a list of parts. The given contents may be plain texts."""
    return tuple({"role": message["role"], "content": list(_parts(message["content"]))} for message in messages)


def _parts(content: str | Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """Return the parts of a message's content; () for null, as in messages with tool calls."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or ()


def _part_to_proto(part: Mapping[str, Any]) -> content_pb2.ContentPart:
    if part["type"] == "text":
        return content_pb2.ContentPart(text=part["text"])
    media = content_pb2.Media(
        uri=part["uri"], media_type=part.get("media_type", ""), sha256=bytes.fromhex(part.get("sha256", ""))
    )
    parts: dict[str, Any] = {part["type"]: media}
    return content_pb2.ContentPart(**parts)


def _part(part: content_pb2.ContentPart) -> dict[str, str]:
    kind = part.WhichOneof("part")
    if kind is None or kind == "text":
        return {"type": "text", "text": part.text}
    media: content_pb2.Media = getattr(part, kind)
    return {"type": kind, "uri": media.uri, "media_type": media.media_type, "sha256": media.sha256.hex()}


def tagged(text: str, tag: str = "answer") -> list[str]:
    """Return the text inside each <tag>...</tag>; the tags' case is ignored. Takes time linear in the text."""
    opening, closing = _patterns(tag)
    found, start = [], opening.search(text)
    while start is not None:
        end = closing.search(text, start.end())
        if end is None:
            break
        found.append(text[start.end() : end.start()])
        start = opening.search(text, end.end())
    return found


@lru_cache
def _patterns(tag: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    return re.compile(f"<{tag}>", re.IGNORECASE), re.compile(f"</{tag}>", re.IGNORECASE)


THINKING = re.compile(r"<(/?)think(?:ing)?\s{0,9}>", re.IGNORECASE)
"""Pattern of a thinking tag. The tag is closing if group 1 is "/", else opening."""


def without_thinking(response: str) -> str:
    """Remove the thinking from a response, even if the thinking was cut off or has its opening tag in the prompt."""
    said: list[str] = []
    place, thinks = 0, False
    for tag in THINKING.finditer(response):
        if tag[1]:
            if not thinks:
                said.clear()
            place, thinks = tag.end(), False
        elif not thinks:
            said.append(response[place : tag.start()])
            thinks = True
    return "".join(said) + ("" if thinks else response[place:])
