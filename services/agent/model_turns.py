"""The model's turns in one conversation: tokens so far, remaining limits, and generation of the next message."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.data.examples import Message
from relaxd.data.tokenizer import LONG_TEXT, PromptTokenizer
from relaxd.envs.replies import ParsedReply, ReplyFormat, read_reply
from relaxd.envs.token_history import TokenHistory
from relaxd.media.prompt_media import PromptMedia, StoredMedia
from relaxd.seeds import seed_of
from relaxd.v1.sample_pb2 import SamplingParams
from services.agent.engines import EngineSession, RunEngines

Encoded = TypeVar("Encoded")


class BadPrompt(Exception):
    """The chat template can't begin or continue a conversation with the prompt.

    The exception's message has the reason.
    """


class PromptTooLong(BadPrompt):
    """The prompt, with what the environment or the program added to it, exceeds data.max_prompt_tokens."""


@dataclass(frozen=True)
class PolicyModel:
    """Model of a run's conversations, the same for all: configuration, tokenizer, form of tool calls, and engines."""

    config: RunConfig
    tokenizer: PromptTokenizer
    form: ReplyFormat | None
    """Form of tool calls in the chat template; None if relaxd can't parse the form."""
    engines: RunEngines


@dataclass(frozen=True)
class MessageTokens:
    """Token ids of a model message and of everything before it, with the message's log-probs."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ModelMessage:
    """A message that the model wrote."""

    text: str
    """Whole text of the message, without the end token."""
    parsed: ParsedReply
    """The message's text, divided into thinking, text and tool calls."""
    cut_by: str
    """Name of the limit that cut the message off: "budget" (rollout.max_new_tokens), "length" (agent.turn_tokens) or
    "asked" (the caller's limit); "" if the model ended the message."""
    prompt_tokens: int
    """Number of tokens before the message."""
    tokens: int
    """Number of tokens of the message."""
    ids: MessageTokens


class ModelTurns:
    """Generates the model's messages in one conversation.

    Their tokens are never encoded again from text.
    """

    def __init__(
        self,
        model: PolicyModel,
        session: EngineSession,
        history: TokenHistory,
        *,
        tools: Sequence[Mapping[str, Any]],
        sampling: Mapping[str, Any],
        seed: int,
        seconds: Callable[[], float],
    ) -> None:
        """Create the turns that continue a token history.

        Args:
            model: the model.
            session: the conversation's session with engines.
            history: the tokens so far.
            tools: schemas of the tools that the model may call.
            sampling: sampling parameters that the prompt's source overrides, by name.
            seed: seed of the model's messages.
            seconds: function that returns how many seconds the conversation may still take.
        """
        self.history = history
        """Token history to which messages are appended."""
        self._model = model
        self._session = session
        self._tools = tools
        self._own_sampling = sampling
        self._budget = sampling.get("max_new_tokens") or model.config.rollout.max_new_tokens
        self._seed = seed
        self._seconds = seconds
        self._count = 0
        """Number of messages that the model has written."""
        self._calls = 0
        """Number of tool calls in the messages that the model has written."""

    @property
    def room(self) -> int:
        """Number of tokens that may still be added to the history."""
        above = max(0, len(self.history.prompt_tokens) - self._model.config.data.max_prompt_tokens)
        return self._budget - above - self.history.length

    async def add_messages(self, messages: Sequence[Message], media: Sequence[StoredMedia] = ()) -> None:
        """Append messages that the model didn't write, and their media, to the history. Raises CannotContinue."""
        await in_thread_if_long(messages, partial(self.history.add_messages, messages, media))

    async def write(
        self, most: int | None = None, stop: Sequence[str] = (), *, stop_tokens: Sequence[int] = (), calls: bool = True
    ) -> ModelMessage:
        """Generate the model's next message, and append it to the history. `room` must be positive.

        Args:
            most: maximum tokens of the message, in addition to the run's limits.
            stop: strings that end the message, in addition to the run's.
            stop_tokens: ids of tokens that end the message, in addition to the run's.
            calls: True to parse tool calls in the message.

        Raises the errors of `RunEngines.generate`.
        """
        config, history, room = self._model.config, self.history, self.room
        allowed = min(room, config.agent.turn_tokens or room)
        limit = min(allowed, most or allowed)
        sampling = sampling_of(config, self._own_sampling, limit, seed_of(self._seed, self._count))
        sampling.stop.extend(text for text in stop if text not in sampling.stop)
        sampling.stop_token_ids.extend(token for token in stop_tokens if token not in sampling.stop_token_ids)
        prompt, media = history.context, PromptMedia.of_stored(history.media)
        with telemetry.part_span("turn", span_attributes(self._session.name, self._count + 1)) as span:
            reply = await self._model.engines.generate(self._session, prompt, sampling, self._seconds, media)
            span.set_attribute("relaxd.tokens", len(reply.tokens))
        parsed = read_reply(
            self._model.tokenizer,
            reply.tokens,
            self._model.form if calls else None,
            self._tools,
            in_thinking=history.opens_thinking,
            first_call=self._calls + 1,
        )
        self._calls += len(parsed.calls)
        self._count += 1
        history.add_reply(reply.tokens, reply.logprobs, reply.versions, parsed.message, stopped=not reply.cut)
        cut_by = "asked" if limit < allowed else "length" if limit < room else "budget"
        ids = MessageTokens(prompt, reply.tokens, reply.logprobs)
        return ModelMessage(reply.text, parsed, cut_by if reply.cut else "", len(prompt), len(reply.tokens), ids)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the tools with these schemas."""
    return [str(dict(tool.get("function", tool)).get("name")) for tool in tools]


def span_attributes(session: str, turn: int) -> dict[str, str | int]:
    """Return the attributes of a turn's trace spans. Turn 0 is the start of the conversation."""
    return {"relaxd.session_id": session, "relaxd.turn": turn}


async def in_thread_if_long(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """Call `encode` and return its result.

    If the messages are long, do so in a thread, so that other conversations continue.
    """
    if sum(len(str(message.get("content"))) for message in messages) < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)


def sampling_of(config: RunConfig, own: Mapping[str, Any], most: int, seed: int) -> SamplingParams:
    """Return the sampling parameters for one message of the model.

    Args:
        config: the run's configuration.
        own: parameters that the prompt's source overrides, by name.
        most: maximum tokens of the message.
        seed: seed of the message.
    """
    names = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_new_tokens")
    values = {name: own.get(name, getattr(config.rollout, name)) for name in names}
    values["min_new_tokens"] = min(values["min_new_tokens"], most)
    return SamplingParams(**values, max_new_tokens=most, seed=seed)
