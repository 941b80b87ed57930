"""Chat completions in OpenAI's form: what programs ask, as far as it is supported, and the answers."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relaxd.data.examples import Message
from relaxd.envs.environment import BadEnvironmentError, check_tools
from relaxd.envs.reply_formats import ParsedReply
from relaxd.json_text import parse_json

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Roles of messages, and what they are for chat templates."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "ask once for each answer"),
    "tool_choice": (("auto", "none"), 'use "auto" or "none"'),
    "parallel_tool_calls": ((True,), "the model may write several calls"),
    "response_format": (({"type": "text"},), "ask for the format in a message"),
    "logprobs": ((False,), "relaxd keeps the log-probs"),
    "top_logprobs": ((0,), "relaxd keeps the log-probs"),
    "logit_bias": (({},), "the run says how the model is sampled"),
    "functions": (([],), "use tools"),
    "function_call": (("none",), "use tools and tool_choice"),
    "modalities": ((["text"],), "the model writes text"),
    "audio": ((), "the model writes text"),
    "web_search_options": ((), "give the model a tool"),
    "return_token_ids": ((False,), "relaxd keeps the token ids"),
    "return_tokens_as_token_ids": ((False,), "relaxd keeps the token ids"),
}
"""Parameters of which only some values are supported, and what to do instead. null always is."""
_UNIMPORTANT = ("stream", "stream_options")
"""Parameters that change only the form of an answer."""


class BadRequest(Exception):
    """A request is refused. The message says why, for the program and its log."""

    def __init__(self, message: str, param: str | None = None, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {
            "error": {
                "message": str(self),
                "type": "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of the model."""

    messages: list[Message]
    """All messages so far, as chat templates get them."""
    tools: list[dict[str, Any]]
    """Schemas of tools."""
    calls: bool
    """False if tool calls are to be left in the text (tool_choice is "none")."""
    most: int | None
    """Maximum length of the answer in tokens, if the program says one."""
    stop: tuple[str, ...]
    """Texts that end the answer."""
    stream: bool
    """True if the answer is to come as events."""
    include_usage: bool
    """True if the numbers of tokens are to come as an event."""
    model: str
    """The model's name, which may be any."""
    digest: bytes
    """Equal in repetitions of a request."""


@dataclass(frozen=True)
class ChatAnswer:
    """An answer: a message of the model."""

    message: Message
    """The message as it was sent, with arguments of calls as objects."""
    thinking: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, model: str) -> dict[str, Any]:
        """Return the answer as a whole."""
        choice = {"index": 0, "message": self._wire(), "finish_reason": self.finish_reason, "logprobs": None}
        return {**self._head("chat.completion", model), "choices": [choice], "usage": self._usage()}

    def events(self, model: str, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer in pieces."""
        delta = self._wire()
        for index, call in enumerate(delta.get("tool_calls", [])):
            call["index"] = index
        head = self._head("chat.completion.chunk", model)
        for piece, finish in ((delta, None), ({}, self.finish_reason)):
            yield {**head, "choices": [{"index": 0, "delta": piece, "finish_reason": finish, "logprobs": None}]}
        if include_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str, model: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": model}

    def _usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    def _wire(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        calls = self.message.get("tool_calls")
        wire: dict[str, Any] = {"role": "assistant", "content": self.message["content"] or (None if calls else "")}
        if self.thinking:
            wire["reasoning_content"] = self.thinking
        if calls:
            wire["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
                for call in calls
            ]
        return wire


def answer_message(parsed: ParsedReply, text: str) -> Message:
    """Return a reply as the program gets it: calls that can't be read stay in the text, unless others can."""
    message = parsed.message
    message.pop("reasoning_content", None)
    if parsed.problem and not parsed.calls:
        message["content"] = text
    return message


def read_request(body: bytes) -> ChatRequest:
    """Read a request. Raises BadRequest, which names what isn't supported."""
    try:
        asked = parse_json(body)
    except ValueError as error:
        raise BadRequest(f"the body isn't JSON: {error}") from error
    if not isinstance(asked, dict):
        raise BadRequest("the body must be an object in JSON")
    asked = {name: value for name, value in asked.items() if value is not None}
    for name, (supported, instead) in REFUSED.items():
        if name in asked and not any(type(one) is type(asked[name]) and one == asked[name] for one in supported):
            raise BadRequest(f"{name} = {_shown(asked[name])} isn't supported: {instead}", name)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list with at least one message", "messages")
    read = [_message(f"messages[{index}]", one) for index, one in enumerate(messages)]
    if read[-1]["role"] == "assistant":
        raise BadRequest("messages end with the assistant, whose turn is next: it can't go on in one", "messages")
    most = asked.get("max_completion_tokens", asked.get("max_tokens"))
    if most is not None and (type(most) is not int or most < 1):
        raise BadRequest(f"max_completion_tokens = {_shown(most)} must be an integer >= 1", "max_completion_tokens")
    digested = {name: value for name, value in asked.items() if name not in _UNIMPORTANT}
    options = asked.get("stream_options", {})
    return ChatRequest(
        messages=read,
        tools=_tools(asked.get("tools", [])),
        calls=asked.get("tool_choice") != "none",
        most=most,
        stop=_stop(asked.get("stop", [])),
        stream=asked.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        model=str(asked.get("model", "")),
        digest=hashlib.sha256(json.dumps(digested, sort_keys=True).encode()).digest(),
    )


def _tools(tools: Any) -> list[dict[str, Any]]:
    try:
        found = check_tools(tools, "tools: the request has")
    except BadEnvironmentError as error:
        raise BadRequest(str(error), "tools") from error
    for index, tool in enumerate(found):
        if tool.get("type") != "function":
            raise BadRequest(
                f"tools[{index}].type = {_shown(tool.get('type'))} isn't supported: use functions", f"tools[{index}]"
            )
    return found


def _stop(stop: Any) -> tuple[str, ...]:
    found = [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or not all(isinstance(text, str) and text for text in found):
        raise BadRequest(f"stop = {_shown(stop)} must be a text, or a list of texts, that aren't empty", "stop")
    return tuple(found)


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise BadRequest(f"{place} = {_shown(message)} must be a message of one of the roles {', '.join(ROLES)}", place)
    role = ROLES[message["role"]]
    read: Message = {"role": role, "content": _content(place, message.get("content"))}
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = _calls(place, message["tool_calls"])
    elif message.get("content") is None and role != "assistant":
        raise BadRequest(f"{place}.content is missing", f"{place}.content")
    if role == "tool":
        read["tool_call_id"] = message.get("tool_call_id")
        if not isinstance(read["tool_call_id"], str):
            raise BadRequest(f"{place}.tool_call_id is missing: it says which call is answered", place)
    if isinstance(message.get("name"), str) and role != "assistant":
        read["name"] = message["name"]
    return read


def _content(place: str, content: Any) -> str:
    if isinstance(content, list):
        for index, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise BadRequest(
                    f"{place}.content[{index}] = {_shown(part)} isn't supported: only parts of type text are",
                    f"{place}.content[{index}]",
                )
        return "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise BadRequest(f"{place}.content = {_shown(content)} must be a text or a list of parts", f"{place}.content")
    return content or ""


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    read = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        try:
            name, arguments = function["name"], parse_json(function["arguments"])  # type: ignore[index]
            if not isinstance(name, str) or not isinstance(arguments, dict) or not isinstance(call["id"], str):
                raise ValueError
        except (TypeError, KeyError, ValueError) as error:
            raise BadRequest(
                f"{place}.tool_calls[{index}] = {_shown(call)} must have an id, and a function with a name and with "
                "arguments that are an object as JSON text",
                f"{place}.tool_calls[{index}]",
            ) from error
        read.append({"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}})
    return read


def new_messages(known: Sequence[Message], asked: Sequence[Message]) -> list[Message]:
    """Return the messages that a request adds to the known ones, the last of which is the model's.

    Raises BadRequest, which says where the request isn't a continuation.
    """
    for index, (ours, theirs) in enumerate(zip(known, asked, strict=False)):
        if what := _difference(ours, theirs):
            raise BadRequest(
                f"messages[{index}] isn't as it was: {what}. A conversation is one sequence of tokens, so its history "
                "can't change: send the earlier messages as they were",
                f"messages[{index}]",
                code="history_changed",
            )
    new = list(asked[len(known) :])
    if not new:
        raise BadRequest(
            f"messages end before messages[{len(known) - 1}], which the model has written already: another answer to "
            "the same messages isn't supported; go on from the one that was given",
            "messages",
            code="history_changed",
        )
    for index, message in enumerate(new, len(known)):
        if message["role"] == "assistant":
            raise BadRequest(
                f"messages[{index}] is the assistant's, but the model hasn't written it in this conversation",
                f"messages[{index}]",
                code="history_changed",
            )
    names = {
        call["id"]: call["function"]["name"] for message in known for call in message.get("tool_calls", [])
    }  # which some chat templates write beside a tool's answer
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in new
    ]


def _difference(ours: Message, theirs: Message) -> str:
    """Return the difference between a message and the known one; "" if there is none.

    Of the assistant's, calls are compared by id and values, and texts without white space around them.
    """
    if ours["role"] != theirs["role"]:
        return f"its role is {theirs['role']}, and was {ours['role']}"
    mine, other = ours["content"], theirs["content"]
    if ours["role"] == "assistant":
        mine, other = mine.strip(), other.strip()
        if (was := _call_list(ours)) != (now := _call_list(theirs)):
            return f"its tool_calls are {_shown(now)}, and were {_shown(was)}"
    elif ours.get("tool_call_id") != theirs.get("tool_call_id"):
        return f"its tool_call_id is {_shown(theirs.get('tool_call_id'))}, and was {_shown(ours.get('tool_call_id'))}"
    if mine != other:
        at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b), min(len(mine), len(other)))
        begin = max(at - 20, 0)
        return f"from character {at} on its content is {_shown(other[begin:])}, and was {_shown(mine[begin:])}"
    return ""


def _call_list(message: Message) -> list[list[Any]]:
    return [
        [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])
    ]


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 200 else f"{text[:197]}..."
