"""Users' functions that lead conversations in place of an environment (agent.function), run by relaxd.envs.host."""

import asyncio
import http.client
import inspect
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from relaxd.data.examples import Message
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, Step, ToolCall, call_of
from relaxd.envs.observation_media import put_media, take_media
from relaxd.importing import ImportProblem, describe_error, import_own

__all__ = ["Answer", "ConversationOver", "Model"]

MAX_STUCK = 200
"""Maximum number of late calls, and of functions of ended conversations, that still run. Above it the process ends, and
a new process is started."""
OVER = ("max_turns", "context_length_exceeded", "conversation_over", "no_session")
"""Error codes of the model's endpoint after which it answers no further request."""
_log = logging.getLogger(__name__)
_left: set[int] = set()
"""Ids of ended conversations whose functions still run."""


class ConversationOver(Exception):
    """A limit of the run is reached or the conversation has ended, so the model answers no more.

    A function that doesn't catch it ends normally, with reward 0.
    """


@dataclass(frozen=True)
class Answer:
    """A message that the model wrote, parsed."""

    message: Message
    """The whole message, to be appended to the messages of the next request."""
    text: str
    """Text of the message, without thinking and tool calls."""
    tool_calls: Sequence[ToolCall]
    """Tool calls of the message that could be parsed."""
    finish_reason: str
    """Reason why the message ended: "stop", "tool_calls", or "length" if it was cut off."""


class Model:
    """Client of the run's model for one conversation."""

    def __init__(self, url: str, key: str) -> None:
        self.base_url = url
        """Base URL of the model for clients of OpenAI's API."""
        self.api_key = key
        """API key of the model for clients of OpenAI's API."""

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Answer:
        """Have the model write the next message.

        Args:
            messages: all messages so far. Their content may have media like an environment's messages.
            tools: schemas of the tools that the model may call, in OpenAI's form.
            max_tokens: maximum length of the message in tokens, besides the run's limits.
            stop: texts that end the message, besides the run's stop texts.

        Raises:
            ConversationOver: the model answers no more.
            ValueError: the request is refused; the message says what is wrong with it.
        """
        wanted = {"tools": list(tools), "max_tokens": max_tokens, "stop": list(stop)}
        sent = [_with_sent_media(f"messages[{index}]", message) for index, message in enumerate(messages)]
        body = {"model": "policy", "messages": sent} | {name: one for name, one in wanted.items() if one}
        status, answer = await asyncio.to_thread(self._post, json.dumps(body).encode())
        if status != 200:
            error = answer.get("error", {})
            raise (ConversationOver if error.get("code") in OVER else ValueError)(str(error.get("message", answer)))
        choice = answer["choices"][0]
        message = choice["message"]
        calls = [ToolCall(one.name, one.arguments, id=call["id"]) for call, one in _calls(message)]
        return Answer(message, message["content"] or "", calls, choice["finish_reason"])

    def _post(self, body: bytes) -> tuple[int, dict[str, Any]]:
        """Send a request to the model, without a timeout, and return the response's HTTP status and JSON content."""
        place = urlsplit(self.base_url)
        connection = http.client.HTTPConnection(place.netloc)
        try:
            headers = {"Authorization": f"Bearer {self.api_key}"}
            connection.request("POST", f"{place.path}/chat/completions", body, headers)
            response = connection.getresponse()
            return response.status, json.load(response)
        except OSError as error:
            raise ConversationOver(f"the endpoint is gone: {error}") from error
        finally:
            connection.close()


def _with_sent_media(place: str, message: Message) -> Message:
    """Return a message whose media are data URIs. Raises MediaError, a ValueError."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    left, items = take_media(f"{place}.content", message.get("role", ""), content, sent=False)
    return {**message, "content": put_media(left, [item.source for item in items])}


def _calls(message: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], ToolCall]]:
    return [(call, call_of(call)) for call in message.get("tool_calls", [])]


class FunctionConversation:
    """A conversation that a function leads, with the interface of an environment: its single step runs the function."""

    def __init__(self, function: Callable[..., Awaitable[Any]], settings: Mapping[str, Any]) -> None:
        self._function = function
        self._settings = settings
        self._model: Model | None = None
        self._sample: Sample | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def connect(self, url: str, key: str) -> None:
        """Set the model's base URL and API key."""
        self._model = Model(url, key)

    def open(self, sample: Sample) -> None:
        self._sample = sample

    def step(self, reply: Reply) -> Step:
        """Run the function in a separate event loop, so that a blocking function doesn't block other conversations."""
        try:
            return asyncio.run(self._lead())
        except asyncio.CancelledError as error:
            raise BadEnvironmentError("the conversation has ended") from error
        finally:
            _left.discard(id(self))

    async def _lead(self) -> Step:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._cancelled:
            raise asyncio.CancelledError
        try:
            value = await self._function(self._sample, self._model, **self._settings)
        except ConversationOver:
            return Step(done=True)
        except Exception as error:
            raise BadEnvironmentError(describe_error(error)) from error
        reward, info = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
        if isinstance(reward, tuple) or (reward is None and info):
            raise BadEnvironmentError(f"the function returned {value!r:.200}: return a reward, or reward and info")
        return Step(None, 0.0 if reward is None else reward, True, info)

    def cancel(self) -> None:
        """Cancel the user's function that leads the conversation, if it is still running."""
        self._cancelled = True
        if self._loop is None or self._task is None or self._loop.is_closed():
            return
        _left.add(id(self))
        if len(_left) > MAX_STUCK:
            _log.error("%d functions don't end with their conversations: this process ends", len(_left))
            os._exit(1)
        try:
            self._loop.call_soon_threadsafe(self._task.cancel)
        except RuntimeError:  # it has ended just now
            _left.discard(id(self))


def load_function(name: str, settings: Mapping[str, Any]) -> Callable[[], FunctionConversation]:
    """Import a user's function, and return a function that creates the conversations that it leads.

    Raises BadEnvironmentError if the user's function doesn't exist, isn't async, or rejects the settings.
    """
    try:
        function = import_own(name)
    except ImportProblem as error:
        raise BadEnvironmentError(f'function "{name}": {error}') from error
    if not inspect.iscoroutinefunction(function):
        raise BadEnvironmentError(
            f'function "{name}" must be async: async def {name.rpartition(":")[2]}(sample, model)'
        )
    try:
        inspect.signature(function).bind(None, None, **settings)
    except TypeError as error:
        raise BadEnvironmentError(
            f'function "{name}" can\'t be called with (sample, model) and {dict(settings)}: {error}; it is '
            f"{name.rpartition(':')[2]}{inspect.signature(function)}"
        ) from error
    return lambda: FunctionConversation(function, settings)
