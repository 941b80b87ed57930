"""Programs' requests for the model's next message, their media, the answers, and messages stored for later requests.

The types don't depend on the protocol. Messages refer to media by hash, like environments' messages."""

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from relaxd.data.examples import Message
from relaxd.data.vision import VisionModel, normalise_shown
from relaxd.envs.observation_media import is_sent
from relaxd.envs.replies import ParsedReply
from relaxd.media.placeholders import Content
from relaxd.media.prompt_media import StoredMedia, reference_part
from relaxd.media.sources import MediaError


class BadRequest(Exception):
    """A program's request is refused. The exception's message has the reason, for the program and its log."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True)
class ChatRequest:
    """A program's request for the model's next message."""

    messages: list[Message]
    """All messages of the conversation so far, in the form of chat templates; empty if the request has `tokens`."""
    tools: list[dict[str, Any]]
    """JSON schemas of the tools that the model may call."""
    calls: bool
    """True if tool calls are parsed; False if they stay in the text (tool_choice is "none")."""
    most: int | None
    """Maximum number of tokens of the answer; None if the program sets no limit."""
    stop: tuple[str, ...]
    """Strings at which the answer ends."""
    digest: bytes
    """Hash of the request; equal if a request is repeated."""
    with_ids: bool = False
    """True if the answer must include token ids."""
    kept: Sequence[Message] | None = None
    """Messages to store with the answer, so that a later request can continue them; None: store nothing."""
    tokens: Sequence[int] = ()
    """Ids of all tokens of the conversation so far, if the request has these instead of messages."""
    stop_tokens: Sequence[int] = ()
    """Ids of tokens that end the answer, in addition to those of the run."""


@dataclass(frozen=True)
class AnswerIds:
    """Token ids of an answer and of its prompt."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str]
    """Text of each token of the answer."""


@dataclass(frozen=True)
class ChatAnswer:
    """Answer to a program's request: a message of the model."""

    message: Message
    """The model's message as sent to the program, but with the arguments of tool calls as objects."""
    thinking: str
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    completion_tokens: int
    id: str
    """Id of the answer, unique among the answers of all sessions."""
    created: int = field(default_factory=lambda: int(time.time()))
    ids: AnswerIds | None = None
    """Token ids of the answer and its prompt, if the request asks for them."""

    @property
    def usage(self) -> dict[str, int]:
        """Numbers of prompt, completion and total tokens, in the form of the chat completions API."""
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer_message(parsed: ParsedReply, text: str) -> Message:
    """Return the message to send to the program: the parsed reply without reasoning_content.

    If parsing failed and found no tool call, the message's content is the reply's whole text.
    """
    message = parsed.message
    message.pop("reasoning_content", None)
    if parsed.problem and not parsed.calls:
        message["content"] = text
    return message


def new_messages(known: Sequence[Message], asked: Sequence[Message]) -> list[Message]:
    """Return the messages that a request adds to the known messages, of which the last is the model's.

    Raises BadRequest, naming the first difference, if the request doesn't continue the known messages.
    """
    for index, (ours, theirs) in enumerate(zip(known, asked, strict=False)):
        if what := _difference(ours, theirs):
            raise BadRequest(
                f"messages[{index}] isn't as it was: {what}",
                f"messages[{index}]",
                code="history_changed",
            )
    new = list(asked[len(known) :])
    if not new:
        raise BadRequest(
            f"messages end before messages[{len(known) - 1}], which the model has written already",
            "messages",
            code="history_changed",
        )
    for index, message in enumerate(new, len(known)):
        if message["role"] == "assistant":
            raise BadRequest(
                f"messages[{index}] is the assistant's, but the model hasn't written it after these messages",
                f"messages[{index}]",
                code="history_changed",
            )
    return with_tool_names(new, known)


def common_messages(known: Sequence[Message], asked: Sequence[Message]) -> int:
    """Return the number of equal messages at the beginning of a known conversation and a request."""
    same = (not _difference(ours, theirs) for ours, theirs in zip(known, asked, strict=False))
    return sum(1 for _ in takewhile(bool, same))


def with_tool_names(messages: Sequence[Message], before: Sequence[Message] = ()) -> list[Message]:
    """Return messages, with the tool's name added to each tool's answer, because some chat templates write it.

    Args:
        messages: the messages to return.
        before: earlier messages, which may contain the tool calls that are answered.
    """
    names = {
        call["id"]: call["function"]["name"]
        for message in (*before, *messages)
        for call in message.get("tool_calls", [])
    }
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in messages
    ]


def _difference(ours: Message, theirs: Message) -> str:
    """Describe the difference between a known message and a message of a request; "" if they are equal.

    In the assistant's messages, calls are compared by id, name and arguments, and texts without surrounding white
    space.
    """
    if ours["role"] != theirs["role"]:
        return f"its role is {theirs['role']}, and was {ours['role']}"
    mine, other = ours["content"], theirs["content"]
    if ours["role"] == "assistant":
        mine, other = mine.strip(), other.strip()
        if (was := _call_list(ours)) != (now := _call_list(theirs)):
            return f"its tool_calls are {shown(now)}, and were {shown(was)}"
    elif ours.get("tool_call_id") != theirs.get("tool_call_id"):
        return f"its tool_call_id is {shown(theirs.get('tool_call_id'))}, and was {shown(ours.get('tool_call_id'))}"
    if mine != other and (isinstance(mine, list) or isinstance(other, list)):
        return f"its content is {shown(other)}, and was {shown(mine)}"
    if mine != other:
        at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
        begin = max(at - 20, 0)
        return f"from character {at} on its content is {shown(other[begin:])}, and was {shown(mine[begin:])}"
    return ""


def _call_list(message: Message) -> list[list[Any]]:
    return [
        [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])
    ]


def shown(value: Any) -> str:
    """Return a value as JSON text for an error message, cut to 200 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else f"{text[:197]}..."


@dataclass(frozen=True)
class Stored:
    """A stored conversation up to and including an answer of the model."""

    messages: Sequence[Message] = ()
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of the tools in the answered request."""


class StoredMessages:
    """The stored messages of one session, by the ids of its answers."""

    def __init__(self) -> None:
        self._stored: dict[str, Stored] = {}

    def keep(self, name: str, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> None:
        """Store the messages up to and including an answer.

        Those shared with the last stored answer are kept in memory once.
        """
        last = next(reversed(self._stored.values()), Stored())
        known = [
            old if old == new else new for old, new in zip(last.messages, messages, strict=False)
        ]  # each request was read anew, so that equal messages aren't the same objects
        shared = last.tools if last.tools == tools else tools
        self._stored[name] = Stored([*known, *messages[len(known) :]], shared)

    def find(self, param: str, name: Any, prefix: str) -> Stored:
        """Return the conversation up to a stored answer, whose id `name` has the protocol's prefix.

        Raises BadRequest.
        """
        found = self._stored.get(name.removeprefix(prefix)) if isinstance(name, str) else None
        if found is None:
            raise BadRequest(f'{param} = "{name}" isn\'t an answer that was stored in this session', param)
        return found


class SessionMedia:
    """Media of a session, each decoded once. Several threads may call `read`."""

    def __init__(self, vision: VisionModel | None = None, prompt: Sequence[StoredMedia] = ()) -> None:
        """Begin with the prompt's media. `vision` has the model's media rules; None in a run without media."""
        self.vision = vision
        self._by_hash = {item.sha256: item for item in prompt}
        self._by_source = {_digest(item.kind, item.uri): item for item in prompt}
        """Media by digest of kind and data URI. The prompt's media are already normalised and are used unchanged."""

    def read(self, place: str, kind: str, source: Any) -> dict[str, Any]:
        """Decode a data URI and return a message part that refers to the medium.

        Raises BadRequest if `source` is no data URI or can't be decoded.
        """
        if not is_sent(source):
            raise BadRequest(
                f'{place} has no {kind} in it: send its content, such as "data:image/png;base64,..."; relaxd fetches '
                "no media",
                place,
            )
        digest = _digest(kind, source)
        if (item := self._by_source.get(digest)) is None:
            try:
                item = StoredMedia.of(normalise_shown(kind, source, self.vision))
            except MediaError as error:
                raise BadRequest(f"{place} {error}", place) from error
            item = self._by_source[digest] = self._by_hash.setdefault(item.sha256, item)
        return reference_part(item)

    def of(self, messages: Sequence[Message]) -> list[StoredMedia]:
        """Return the media that messages refer to, in order."""
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        return [self._by_hash[part["sha256"]] for content in contents for part in content if part["type"] != "text"]


def joined(parts: Sequence[dict[str, Any]]) -> Content:
    """Return message parts as a message's content: consecutive texts are joined, and content without media is a plain
    string."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] != "text" or not found or found[-1]["type"] != "text":
            found.append(part)
        else:
            found[-1] = {"type": "text", "text": found[-1]["text"] + part["text"]}
    if any(part["type"] != "text" for part in found):
        return [part for part in found if part.get("text") != ""]
    return found[0]["text"] if found else ""


def _digest(kind: str, source: str | list[str]) -> bytes:
    return hashlib.sha256(json.dumps([kind, source]).encode()).digest()
