"""Prompts as rows have them: text, a list of chat messages, or the JSON text of such a list."""

from typing import Any

from relaxd.data.examples import Message
from relaxd.data.files.rows import kind_of, stranger
from relaxd.json_text import parse_json
from relaxd.media import MediaReader

FORM = '{"role": "user", "content": "..."}'


def read_prompt(key: str, value: Any, media: MediaReader | None = None) -> str | list[Message]:
    """Return a prompt from the value of a column or of a user's own function.

    Messages keep all of their fields, except nulls: tables give an object every key that any of them has. Content parts
    of text are joined; with images among them they stay parts. Content may be null beside tool calls.

    Args:
        key: the column or the setting, for errors.
        value: a plain value.
        media: takes the items out of it, and has those of the row's columns.

    Raises:
        ValueError: it is no prompt; the message names the key and what would be right.
    """
    media = media or MediaReader()
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f'"{key}" is empty')
        value = _chat_from_text(value)
        if isinstance(value, str):
            content = media.content(f'"{key}"', "user", value)
            return content if isinstance(content, str) else [{"role": "user", "content": content}]
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{key}" must be text or a list of chat messages, not {kind_of(value)}')
    return [_message(f'"{key}"[{index}]', message, media) for index, message in enumerate(value)]


def without_nulls(value: Any) -> Any:
    """Return a value without null entries of objects: tables give objects every key that any of them has."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def _chat_from_text(text: str) -> str | list[Any]:
    """Return the messages of a chat that a column stores as JSON text; any other text as it is."""
    if not text.lstrip().startswith("["):
        return text
    try:
        found = parse_json(text)
    except ValueError:
        return text
    is_chat = isinstance(found, list) and found and all(isinstance(one, dict) and "role" in one for one in found)
    return found if is_chat else text


def _message(place: str, value: Any, media: MediaReader) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise ValueError(f"{place} must look like {FORM}")
    has_parts = isinstance(value.get("content"), list)  # which the reader checks: items may be bytes
    if found := stranger("message", {**value, "content": None} if has_parts else value):
        raise ValueError(f"{place} has {kind_of(found[1])}, which a chat message can't have: it must look like {FORM}")
    message: Message = without_nulls(value)
    content = message.get("content")
    if isinstance(content, list | str):
        return {**message, "content": media.content(f"{place}.content", message["role"], content)}
    if content is None and not message.get("tool_calls"):
        raise ValueError(f"{place}.content is null or missing, and there are no tool_calls: it must look like {FORM}")
    if content is not None:
        raise ValueError(f"{place}.content must be text or a list of parts, not {kind_of(content)}")
    return {**message, "content": content}
