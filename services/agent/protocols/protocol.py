"""Interface of the endpoint's protocols, and parsing functions that they share."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.data.examples import Message
from relaxd.envs.environment import BadEnvironmentError, check_tools
from relaxd.media.placeholders import Content
from relaxd.media.sources import MediaError
from relaxd.text import parse_json
from services.agent.chat_requests import (
    BadRequest,
    ChatAnswer,
    ChatRequest,
    SessionMedia,
    StoredMessages,
    joined,
    shown,
)

MODEL = "policy"
"""The endpoint's name for the model; requests may use any name."""
_UNIMPORTANT = ("stream", "stream_options")
"""Parameters that change only the form of an answer; ignored in digests."""
_INSTEAD = "send video and sound through chat completions (video_url, input_audio)"
"""Advice in errors about video and sound, for protocols that can't send them."""

Supported = Mapping[str, tuple[tuple[Any, ...], str]]
"""By parameter: the supported values, and advice for other values. null is always supported."""


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    told = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    return {"error": told}


@dataclass(frozen=True)
class Parts:
    """The types of content parts that a protocol supports."""

    texts: Collection[str]
    """Types of text parts."""
    media: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]]
    """By type of media part: kind of media, and a function that returns the part's data URI, or any other value if it
    has none. The function may raise MediaError for a missing field."""


@dataclass(frozen=True)
class Protocol:
    """Functions that parse a protocol's requests and make its answers."""

    read: Callable[[dict[str, Any], StoredMessages, SessionMedia], ChatRequest]
    """Parses a request's body without nulls, given the session's stored messages and media. Raises BadRequest, which
    names the unsupported parameter."""
    whole: Callable[[ChatAnswer, dict[str, Any]], dict[str, Any]]
    """Returns the body of an answer to a request's body."""
    events: Callable[[ChatAnswer, dict[str, Any]], Iterable[str]]
    """Returns the same answer as server-sent events."""
    error: Callable[[BadRequest], dict[str, Any]] = error_body
    """Returns the body of the answer to a refused request."""


def named_events(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield server-sent events named by their types."""
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def model_of(asked: Mapping[str, Any]) -> str:
    """Return the request's name for the model; MODEL by default."""
    return str(asked.get("model") or MODEL)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a request's body and leave out parameters that are null. Raises BadRequest."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise BadRequest(f"the body isn't JSON: {error}") from error
    if not isinstance(asked, dict):
        raise BadRequest("the body must be an object in JSON")
    return {name: value for name, value in asked.items() if value is not None}


def check_supported(asked: Mapping[str, Any], table: Supported) -> None:
    """Raise BadRequest if a parameter has an unsupported value."""
    for name, (supported, instead) in table.items():
        if name in asked and not any(type(one) is type(asked[name]) and one == asked[name] for one in supported):
            raise BadRequest(f"{name} = {shown(asked[name])} isn't supported: {instead}", name)


def request_of(
    asked: Mapping[str, Any],
    messages: list[Message],
    tools: list[dict[str, Any]],
    *,
    calls: bool,
    most: Sequence[str],
    stop: str = "",
    place: str = "messages",
    kept: Sequence[Message] | None = None,
) -> ChatRequest:
    """Return a request for the next message.

    Args:
        asked: the request's body.
        messages: its messages.
        tools: schemas of its tools.
        calls: False to leave tool calls in the text.
        most: names of the parameter for the maximum length; the first one present is used.
        stop: name of the parameter for strings that end the answer; "" if the protocol has none.
        place: name of the parameter with the messages, for errors.
        kept: messages to store with the answer.

    Raises BadRequest.
    """
    if not messages:
        raise BadRequest(f"{place} must have at least one message", place)
    if messages[-1]["role"] == "assistant":
        raise BadRequest(f"{place} end with the assistant, whose turn is next: it can't go on in one", place)
    return ChatRequest(
        messages=messages,
        tools=tools,
        calls=calls,
        most=next((positive(name, asked[name]) for name in most if name in asked), None),
        stop=texts(stop, asked.get(stop, [])),
        digest=digest_of(asked),
        kept=kept,
    )


def digest_of(asked: Mapping[str, Any]) -> bytes:
    """Return a request's digest. Requests that differ only in the answer's form have the same digest."""
    digested = {name: value for name, value in asked.items() if name not in _UNIMPORTANT}
    return hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).digest()


def positive(name: str, value: Any) -> int:
    """Return `value`. Raises BadRequest unless it is a positive integer."""
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} = {shown(value)} must be an integer >= 1", name)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a text or a list of texts as a tuple. Raises BadRequest for other values and empty texts."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"{name} = {shown(value)} must be a text, or a list of texts, that aren't empty", name)
    return tuple(found)


def read_list(asked: Mapping[str, Any], name: str) -> list[Any]:
    """Return a parameter. Raises BadRequest unless it is a list with at least one element."""
    value = asked.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list with at least one message", name)
    return value


def read_content(place: str, content: Any, forms: Parts, media: SessionMedia | None = None) -> Content:
    """Parse a message's content, a text or a list of parts. Without `media` it must contain no media.

    Raises BadRequest.
    """
    if isinstance(content, list):
        return joined([read_part(f"{place}[{index}]", part, forms, media) for index, part in enumerate(content)])
    if not isinstance(content, str | None):
        raise BadRequest(f"{place} = {shown(content)} must be a text or a list of parts", place)
    return content or ""


def read_part(place: str, part: Any, forms: Parts, media: SessionMedia | None = None) -> dict[str, Any]:
    """Parse a content part; media become references. Raises BadRequest."""
    kind = part["type"] if isinstance(part, dict) and isinstance(part.get("type"), str) else ""
    if media is not None and kind in forms.media:
        of_media, source = forms.media[kind]
        try:
            return media.read(place, of_media, source(part))
        except MediaError as error:
            raise BadRequest(f"{place} {error}", place) from error
    if kind in forms.texts and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    kinds = " or ".join([*forms.texts, *(forms.media if media is not None else ())])
    instead = f"; {_INSTEAD}" if media is not None and ("video" in kind or "audio" in kind) else ""
    raise BadRequest(f"{place} = {shown(part)} isn't supported: only parts of type {kinds} are{instead}", place)


def input_audio(part: Mapping[str, Any]) -> Any:
    """Return the data URI of a part of OpenAI's type input_audio, or any other value if it has no input_audio object.

    Raises MediaError if a field is missing.
    """
    sound = part.get("input_audio")
    if not isinstance(sound, dict):
        return sound
    for field, example in (("data", "the sound's base64"), ("format", '"wav"')):
        if not isinstance(sound.get(field), str) or not sound[field]:
            raise MediaError(
                f"has input_audio.{field} = {shown(sound.get(field))}: it must be a text, such as {example}"
            )
    return f"data:audio/{sound['format']};base64,{sound['data']}"


def read_functions(tools: Any) -> list[dict[str, Any]]:
    """Check schemas of functions in the form of chat completions, and return them. Raises BadRequest."""
    try:
        found = check_tools(tools, "tools: the request has")
    except BadEnvironmentError as error:
        raise BadRequest(str(error), "tools") from error
    for index, tool in enumerate(found):
        if tool.get("type") != "function":
            raise BadRequest(
                f"tools[{index}].type = {shown(tool.get('type'))} isn't supported: use functions", f"tools[{index}]"
            )
    return found


def call_of(name: Any, arguments: Any, id_: Any) -> dict[str, Any]:
    """Return a tool call in the form of chat templates. `arguments` may be JSON text. Raises ValueError if invalid."""
    read = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(read, dict) or not isinstance(id_, str):
        raise ValueError("a tool call has an id, a name, and arguments that are an object")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": read}}
