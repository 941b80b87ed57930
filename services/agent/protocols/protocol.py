"""The base of the endpoint's protocols, with their common parsing."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.data.examples import Message
from relaxd.envs.environment import BadEnvironmentError, check_tools
from relaxd.json_text import parse_json
from relaxd.media.placeholders import Content
from relaxd.media.sources import MediaError
from services.agent.chat_requests import BadRequest, ChatAnswer, ChatRequest, StoredMessages, shown
from services.agent.session_media import SessionMedia, joined

MODEL = "policy"
"""The endpoint's name for the model; requests may use any name."""
_UNIMPORTANT = ("stream", "stream_options")
"""Parameters that change only the form of an answer."""
_INSTEAD = "send video and sound through chat completions (video_url, input_audio)"
"""Advice for media in protocols without parts for them."""

Supported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Parameters with only some supported values, and the alternative to the others. null is always supported."""


def error_body(error: BadRequest) -> dict[str, Any]:
    """Return an error in OpenAI's form."""
    told = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": error.code}
    return {"error": told}


@dataclass(frozen=True)
class Parts:
    """The parts of a protocol's contents."""

    texts: Collection[str]
    """Types of parts that are text."""
    media: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]]
    """The kind of media of a part, and a function that returns its data URI or anything else if it has none, by its
    type. The function raises MediaError if a field of the part is missing."""


@dataclass(frozen=True)
class Protocol:
    """A form of requests and answers."""

    read: Callable[[dict[str, Any], StoredMessages, SessionMedia], ChatRequest]
    """Parses a request without nulls, which may continue stored messages, and its media. Raises BadRequest, which names
    unsupported parts."""
    whole: Callable[[ChatAnswer, dict[str, Any]], dict[str, Any]]
    """Returns an answer to a request."""
    events: Callable[[ChatAnswer, dict[str, Any]], Iterable[str]]
    """Returns the same as server-sent events."""
    error: Callable[[BadRequest], dict[str, Any]] = error_body
    """Returns the answer to a request that is refused."""


def named_events(events: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield server-sent events named by their types."""
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def model_of(asked: Mapping[str, Any]) -> str:
    """Return the name that a request has for the model."""
    return str(asked.get("model") or MODEL)


def read_object(body: bytes) -> dict[str, Any]:
    """Read a request's body; null counts as empty. Raises BadRequest."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise BadRequest(f"the body isn't JSON: {error}") from error
    if not isinstance(asked, dict):
        raise BadRequest("the body must be an object in JSON")
    return {name: value for name, value in asked.items() if value is not None}


def check_supported(asked: Mapping[str, Any], table: Supported) -> None:
    """Check parameters. Raises BadRequest for an unsupported value."""
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
        calls: False if tool calls are to be left in the text.
        most: names of the parameter for the maximum length; the first one wins.
        stop: name of the parameter for texts that end the answer; empty: none.
        place: name of the parameter that has the messages.
        kept: messages to be stored with the answer.

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
    """Return a digest of a request, which is that of its repetitions in another form."""
    digested = {name: value for name, value in asked.items() if name not in _UNIMPORTANT}
    return hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).digest()


def positive(name: str, value: Any) -> int:
    """Return a number that must be positive. Raises BadRequest."""
    if type(value) is not int or value < 1:
        raise BadRequest(f"{name} = {shown(value)} must be an integer >= 1", name)
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Return texts, also from a single text. Raises BadRequest."""
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"{name} = {shown(value)} must be a text, or a list of texts, that aren't empty", name)
    return tuple(found)


def read_list(asked: Mapping[str, Any], name: str) -> list[Any]:
    """Return a parameter that is a list with at least one element. Raises BadRequest."""
    value = asked.get(name)
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list with at least one message", name)
    return value


def read_content(place: str, content: Any, forms: Parts, media: SessionMedia | None = None) -> Content:
    """Return a content: a text or a list of parts; without `media` it may contain none. Raises BadRequest."""
    if isinstance(content, list):
        return joined([read_part(f"{place}[{index}]", part, forms, media) for index, part in enumerate(content)])
    if not isinstance(content, str | None):
        raise BadRequest(f"{place} = {shown(content)} must be a text or a list of parts", place)
    return content or ""


def read_part(place: str, part: Any, forms: Parts, media: SessionMedia | None = None) -> dict[str, Any]:
    """Return a part of a content, an item by reference. Raises BadRequest."""
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
    """Return the data URI of a part of OpenAI's type input_audio; anything else if it has none.

    Raises MediaError: a field is missing.
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
    """Return schemas of functions, in the form of chat completions. Raises BadRequest."""
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
    """Return a tool call in the form of chat templates; arguments may be JSON text. Raises ValueError if it isn't
    one."""
    read = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(read, dict) or not isinstance(id_, str):
        raise ValueError("a tool call has an id, a name, and arguments that are an object")
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": read}}
