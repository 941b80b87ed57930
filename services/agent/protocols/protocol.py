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
"""Name of the model at the endpoint. Requests may use any name."""
_UNIMPORTANT = ("stream", "stream_options")
"""Parameters that change only the form of an answer. Requests' digests ignore them."""
_INSTEAD = "send video and sound through chat completions (video_url, input_audio)"
"""Advice in errors about video and sound, for protocols that can't send them."""

Supported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Supported values of each parameter, and advice for errors about other values. null is always supported."""


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return the JSON body of an error answer in OpenAI's form."""
    told = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    return {"error": told}


@dataclass(frozen=True)
class Parts:
    """The types of content parts that a protocol supports."""

    texts: Collection[str]
    """Type names of text parts."""
    media: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]]
    """By type name of a media part: the kind of media, and a function that returns the part's data URI, or any other
    value if the part has none. The function may raise MediaError for a missing field."""


@dataclass(frozen=True)
class Protocol:
    """Functions that parse a protocol's requests and build its answers."""

    read: Callable[[dict[str, Any], StoredMessages, SessionMedia], ChatRequest]
    """Function that parses a request's body, from which nulls were removed, given the session's stored messages and
    media. Raises BadRequest, which names the unsupported parameter."""
    whole: Callable[[ChatAnswer, dict[str, Any]], dict[str, Any]]
    """Function that returns the JSON body of an answer, given the answer and the request's body."""
    events: Callable[[ChatAnswer, dict[str, Any]], Iterable[str]]
    """Function that returns an answer as server-sent events, given the answer and the request's body."""
    error: Callable[[BadRequest], dict[str, Any]] = error_body
    """Function that returns the JSON body of the answer to a refused request."""


def named_events(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield server-sent events; each event's name is the value of its field `type`."""
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def model_of(asked: Mapping[str, Any]) -> str:
    """Return the name by which a request calls the model; MODEL by default."""
    return str(asked.get("model") or MODEL)


def read_object(body: bytes) -> dict[str, Any]:
    """Parse a request's JSON body, and remove parameters that are null. Raises BadRequest."""
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
    """Build a request for the model's next message from the parsed body of a program's request.

    Args:
        asked: the request's body.
        messages: the request's messages.
        tools: schemas of the request's tools.
        calls: False to leave tool calls in the text.
        most: names of the parameter for the maximum length. The first name that the request has is used.
        stop: name of the parameter for strings that end the answer; "" if the protocol has none.
        place: name of the parameter with the messages, for errors.
        kept: messages to store with the answer; None to store nothing.

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
    """Return a digest that identifies repeated requests. Parameters that change only the answer's form are left out."""
    digested = {name: value for name, value in asked.items() if name not in _UNIMPORTANT}
    return hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).digest()


def positive(name: str, value: Any) -> int:
    """Return `value` if it is a positive integer, else raise BadRequest, which names the parameter `name`."""
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} = {shown(value)} must be an integer >= 1", name)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return a string or a list of strings as a tuple. Raises BadRequest for other values and empty strings."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"{name} = {shown(value)} must be a text, or a list of texts, that aren't empty", name)
    return tuple(found)


def read_list(asked: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list that is the parameter `name`.

    Raises BadRequest unless it is a list with at least one element.
    """
    value = asked.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list with at least one message", name)
    return value


def read_content(place: str, content: Any, forms: Parts, media: SessionMedia | None = None) -> Content:
    """Parse a message's content, a string or a list of parts. If `media` is None, the content must not have media.

    Raises BadRequest.
    """
    if isinstance(content, list):
        return joined([read_part(f"{place}[{index}]", part, forms, media) for index, part in enumerate(content)])
    if not isinstance(content, str | None):
        raise BadRequest(f"{place} = {shown(content)} must be a text or a list of parts", place)
    return content or ""


def read_part(place: str, part: Any, forms: Parts, media: SessionMedia | None = None) -> dict[str, Any]:
    """Parse a content part. A media part becomes a reference to the medium. Raises BadRequest."""
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
    """Return the data URI of a part of OpenAI's type input_audio, or any other value if the part has no input_audio
    object.

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
    """Check the schemas of a request's tools, which must be functions in chat completions' form, and return them.

    Raises BadRequest.
    """
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
    """Return a tool call in the form of chat templates. `arguments` is an object or its JSON text.

    Raises ValueError if a part is invalid.
    """
    read = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(read, dict) or not isinstance(id_, str):
        raise ValueError("a tool call has an id, a name, and arguments that are an object")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": read}}
