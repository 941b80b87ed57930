"""Messages of conversations, as rewards see them and as protos."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relaxd.rewards.interface import Message, text_message
from relaxd.v1 import content_pb2


def to_proto(messages: Iterable[Mapping[str, Any]]) -> list[content_pb2.Message]:
    """Convert messages, whose content may also be a text, as in chat messages of data."""
    return [
        content_pb2.Message(role=message["role"], content=map(_part_to_proto, _parts(message["content"])))
        for message in messages
    ]


def from_proto(messages: Iterable[content_pb2.Message]) -> list[Message]:
    """Convert messages, each of whose parts is set."""
    return [{"role": message.role, "content": [_part(part) for part in message.content]} for message in messages]


def text_and_media(messages: Sequence[content_pb2.Message], role: str) -> tuple[str, tuple[Message, ...]]:
    """Return the last message's text, and the messages unless they are no more than that text by `role`.

    Of a prompt, whose role is "user", it is the last message that isn't the assistant's: one at the end is the
    beginning of the answer.
    """
    if not messages:
        return "", ()
    asked = (one for one in reversed(messages) if role != "user" or one.role != "assistant")
    text = "\n".join(part.text for part in next(asked, messages[-1]).content if part.HasField("text"))
    found = tuple(from_proto(messages))
    return text, () if found in ((text_message("", text),), (text_message(role, text),)) else found


def with_parts(messages: Iterable[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Return messages whose content is a list of parts, from messages whose content may also be a text."""
    return tuple({"role": message["role"], "content": list(_parts(message["content"]))} for message in messages)


def _parts(content: str | Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    """Return a message's parts: none of one whose content is null, as beside tool calls."""
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
