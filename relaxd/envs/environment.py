"""The interface of environments: the methods of a Python class, their arguments, and checks of their results."""

import json
import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from relaxd.data.examples import Message
from relaxd.envs.observation_media import put_media, take_media
from relaxd.media.messages import tagged
from relaxd.media.placeholders import MediaItem
from relaxd.media.sources import MediaError


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a model's message, or the reason why the text of a call isn't valid."""

    name: str = ""
    """Name of the called tool."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the tool call, by name."""
    problem: str = ""
    """Reason why the tool call isn't valid; "" if it is valid."""
    id: str = ""
    """Id of the tool call in the conversation, for the tool's answer; "" if the call has no id."""


def calls_in(text: str) -> list[ToolCall]:
    """Return the tool calls in a reply's text, in their order. Takes time linear in the text."""
    return [call_of(json_of(block)) for block in tagged(text, "tool_call")]


def call_of(value: Any) -> ToolCall:
    """Convert a JSON value such as {"name": ..., "arguments": {...}} to a tool call."""
    inner = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(inner, dict):
        return ToolCall(problem='a tool call is {"name": ..., "arguments": {...}} in JSON')
    name, arguments = inner.get("name"), inner.get("arguments", inner.get("parameters", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(problem="a tool call has no name")
    if isinstance(arguments, str):
        arguments = json_of(arguments)
    if not isinstance(arguments, dict):
        return ToolCall(name, problem=f"the arguments of {name} are no object in JSON")
    return ToolCall(name, arguments)


def json_of(text: str) -> Any:
    """Return the parsed value of a JSON text; None if the text isn't JSON."""
    try:
        return json.loads(text.strip())
    except (ValueError, RecursionError):
        return None


__all__ = ["BadEnvironmentError", "Environment", "Observation", "Reply", "Sample", "Step", "ToolCall"]

Observation = str | Message | Sequence[Message] | None
"""Observation of an environment: a text, a message, several messages, or nothing. A text answers the tool calls of the
model's message; without calls it becomes a user message. The content of a message is a text, or a list of texts and
media (docs/agents.md)."""
MAX_BYTES = 1 << 20
"""Maximum size of an observation without its media, and of the tools' schemas, as JSON in UTF-8, in bytes."""
STEP = "return Step(observation, reward, done, info), or a tuple of the first two, three or four of these"


class BadEnvironmentError(ValueError):
    """An environment can't be used, or returned an invalid value. The message says what would be valid."""


@dataclass(frozen=True)
class Sample:
    """Input of an environment for a new conversation: the prompt, its reference answer, its metadata and a seed."""

    messages: Sequence[Message]
    """Messages of the prompt. A media item is a part of a message, {"type": "image", "image": a data URI}, in its
    normal form."""
    answer: str = ""
    """Reference answer of the prompt; "" if the data has none."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the prompt: further fields of its row in the data."""
    seed: int = 0
    """Seed of the environment's state, the same for all samples of a group."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that come with the prompt, in OpenAI's form."""


@dataclass(frozen=True)
class Reply:
    """A message of the model to the environment."""

    text: str
    """Text of the message without thinking and tool calls."""
    tool_calls: Sequence[ToolCall] = ()
    """Tool calls in the message that could be parsed."""
    problem: str = ""
    """Reason why a tool call in the message can't be parsed; "" if all calls can."""
    finish_reason: str = "stop"
    """Reason why the message ended. "length" means that it was cut off; then it is the last message."""


@dataclass(frozen=True)
class Step:
    """The environment's answer to a message of the model."""

    observation: Observation = None
    """Observation that answers the model's message; None ends the conversation."""
    reward: float = 0.0
    """Reward of this step for the player who spoke. A conversation's rewards are added up."""
    done: bool = False
    """True if the conversation is over."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Numbers for rewards and metrics, by name; the last value of each name counts. Values of other types are
    dropped."""
    player: int = 0
    """Number of the player whose turn is next, from 0 to agent.players - 1. Only this player sees the observation.
    Player 0 speaks first."""
    rewards: Mapping[int, float] = field(default_factory=dict)
    """Rewards of this step for the players who didn't speak, by the player's number."""


class Environment:
    """Base class of environments. An instance holds a single conversation and gets agent.settings as arguments.

    A class need not inherit from this class: it only needs a method `step`. Methods may be async.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the model may call, in OpenAI's form, for the chat template. `open` may set them."""

    def open(self, sample: Sample) -> Observation | Awaitable[Observation]:
        """Begin the conversation about a sample. Returns messages to add after the prompt's messages."""
        return None

    def step(self, reply: Reply) -> Step | tuple[Any, ...] | Awaitable[Step | tuple[Any, ...]]:
        """Answer a message of the model with an observation and a reward."""
        raise NotImplementedError

    def close(self) -> Awaitable[None] | None:
        """End the conversation. It is called after failed conversations, too."""
        return None


def check_step(value: object, calls: Sequence[ToolCall] = ()) -> Step:
    """Check the result of an environment's `step`. Returns the step with messages as observation and only numbers as
    info. `calls` are the tool calls that the step answers.

    Raises BadEnvironmentError if the result is invalid.
    """
    if isinstance(value, tuple) and 2 <= len(value) <= 4:
        value = Step(*value)
    if not isinstance(value, Step):
        raise BadEnvironmentError(f"step() returned {shown(value)}: {STEP}")
    if not isinstance(as_python(value.done), bool):
        raise BadEnvironmentError(f"step() returned done = {shown(value.done)}: it must be True or False")
    if not isinstance(value.info, Mapping):
        raise BadEnvironmentError(f"step() returned info = {shown(value.info)}: it must be a dict of numbers")
    numbers = {
        name: finite_number(number, f"step() returned info[{name!r}] =")
        for name, number in value.info.items()
        if isinstance(name, str) and isinstance(as_python(number), Real)
    }
    check_size(list(numbers), "step() returned info with")
    reward = finite_number(value.reward, "step() returned the reward")
    player = player_number(value.player, "step() returned player =")
    if not isinstance(value.rewards, Mapping):
        raise BadEnvironmentError(f"step() returned rewards = {shown(value.rewards)}: it must be a dict of numbers")
    rewards = {
        player_number(other, "step() returned rewards for the player"): finite_number(
            number, f"step() returned rewards[{other!r}] ="
        )
        for other, number in value.rewards.items()
    }
    messages = messages_of(value.observation, "step() returned", calls)
    return Step(messages, reward, bool(value.done), numbers, player, rewards)


def player_number(value: object, what: str) -> int:
    """Check a player's number and return it as int. Raises BadEnvironmentError, whose message begins with `what`, if it
    is invalid."""
    number = as_python(value)
    if type(number) is not int or not 0 <= number < 2**31:
        raise BadEnvironmentError(f"{what} {shown(value)}: it must be a number from 0 to agent.players - 1")
    return number


def finite_number(value: object, what: str) -> float:
    """Convert a finite number of Python, numpy or torch to float. Raises BadEnvironmentError, whose message begins with
    `what`, for anything else."""
    number = as_python(value)
    if not isinstance(number, Real):
        raise BadEnvironmentError(f"{what} {shown(value)}: it must be a finite number")
    try:
        found = float(number)
    except OverflowError as error:
        raise BadEnvironmentError(f"{what} a number that is too large for a float64") from error
    if not math.isfinite(found):
        raise BadEnvironmentError(f"{what} {found}: it must be a finite number")
    return found


def messages_of(observation: object, what: str, calls: Sequence[ToolCall] = (), *, sent: bool = False) -> list[Message]:
    """Return an observation as a list of messages whose media are data URIs. Arguments and errors are those of
    `read_observation`."""
    return [
        {**message, "content": put_media(message["content"], [item.source for item in items])}
        for message, items in read_observation(observation, what, calls, sent=sent)
    ]


def read_observation(
    observation: object, what: str, calls: Sequence[ToolCall] = (), *, sent: bool = False
) -> list[tuple[Message, list[MediaItem]]]:
    """Return an observation as messages without their media, each with the list of its media as data URIs.

    A text answers the tool calls `calls`, if there are any. With `sent`, media must be data URIs already. Raises
    BadEnvironmentError for an invalid observation; the message begins with `what`, such as "step() returned".
    """
    if observation is None:
        return []
    if isinstance(observation, str):
        observation = [tool_message(call, observation) for call in calls] or {"role": "user", "content": observation}
    messages = [observation] if isinstance(observation, Mapping) else observation
    if not isinstance(messages, Sequence) or isinstance(messages, bytes | bytearray):
        raise BadEnvironmentError(
            f"{what} the observation {shown(observation)}: it must be a text, a message, a list of messages or None"
        )
    found = list[tuple[Message, list[MediaItem]]]()
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
            raise BadEnvironmentError(
                f'{what} the message {shown(message)}: it must be like {{"role": "user", "content": "..."}}'
            )
        content, items = message.get("content"), list[MediaItem]()
        if isinstance(content, list | tuple):
            try:
                content, items = take_media(f"messages[{index}].content", message["role"], content, sent=sent)
            except MediaError as error:
                raise BadEnvironmentError(f"{what} messages of which {error}") from error
        if not isinstance(content, str | list):
            raise BadEnvironmentError(
                f"{what} a message with the content {shown(content)}: it must be text, or a list of parts, "
                '{"type": "text", "text": "..."} or media such as {"type": "image", "image": ...}'
            )
        if len(content) > MAX_BYTES:
            raise _too_large(f"{what} a message of", len(content))
        found.append(({**message, "content": content}, items))
    check_size([text for text, _ in found], f"{what} messages with")
    return found


def tool_message(call: ToolCall, content: str | Sequence[Any]) -> Message:
    """Return the message with a tool's answer to a call. `content` is a text or a list of parts."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}


def shorten(text: str, most: int) -> str:
    """Shorten a text to about `most` characters: the middle of a longer text is replaced by a note."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - end]}\n[{len(text) - most} characters left out]\n{text[len(text) - end :]}"


def check_tools(tools: object, what: str = "the environment has") -> list[dict[str, Any]]:
    """Check schemas of tools and return them as dicts. Raises BadEnvironmentError, whose message begins with `what`, if
    they are invalid."""
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise BadEnvironmentError(f"{what} tools = {shown(tools)}: they must be a list of schemas in OpenAI's form")
    for tool in tools:
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadEnvironmentError(
                f'{what} the tool {shown(tool)}: it must be like {{"type": "function", "function": {{"name": "add", '
                '"description": "...", "parameters": {"type": "object", "properties": {}}}}'
            )
    check_size(list(tools), f"{what} tools with")
    return [dict(tool) for tool in tools]


def check_size(value: Any, what: str) -> None:
    """Check that a value is valid JSON of at most MAX_BYTES. Raises BadEnvironmentError, whose message begins with
    `what`, if it isn't."""
    try:
        size = len(json.dumps(value, ensure_ascii=False, allow_nan=False).encode())
    except UnicodeEncodeError as error:
        raise BadEnvironmentError(
            f"{what} text that isn't valid UTF-8: it has the character {error.object[error.start]!r}; decode bytes "
            'with errors="replace"'
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise BadEnvironmentError(f"{what} what JSON can't have: {error}") from error
    if size > MAX_BYTES:
        raise _too_large(what, size)


def _too_large(what: str, size: int) -> BadEnvironmentError:
    return BadEnvironmentError(f"{what} {size} bytes, which is more than {MAX_BYTES}: shorten them")


def as_python(value: object) -> object:
    """Convert a scalar of numpy or torch, such as np.bool_, to Python's type; return other values unchanged."""
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else value


def shown(value: object) -> str:
    """Return a value and its type as text for an error message, shortened."""
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
