"""The model's messages in one conversation: its tokens so far, the remaining limits, and the next message."""

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
    """The chat template can't begin a conversation with the prompt, or continue it. The message has the reason."""


class PromptTooLong(BadPrompt):
    """With the additions of the environment or the program, a prompt exceeds data.max_prompt_tokens."""


@dataclass(frozen=True)
class PolicyModel:
    """The model that a run's conversations talk to."""

    config: RunConfig
    tokenizer: PromptTokenizer
    form: ReplyFormat | None
    """Form of the chat template's tool calls."""
    engines: RunEngines


@dataclass(frozen=True)
class MessageTokens:
    """Tokens of a message of the model, and of everything before it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]


@dataclass(frozen=True)
class ModelMessage:
    """A message of the model."""

    text: str
    """The whole text without the end token."""
    parsed: ParsedReply
    """The text, divided into thinking, text and tool calls."""
    cut_by: str
    """Limit that cut it off: "budget" (rollout.max_new_tokens), "length" (agent.turn_tokens) or "asked" (the caller's);
    "": the model ended it."""
    prompt_tokens: int
    """Number of tokens before the message."""
    tokens: int
    """Number of its tokens."""
    ids: MessageTokens


class ModelTurns:
    """Has the model write its messages in one conversation. Its own tokens are never encoded again."""

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
        """Continue a history.

        Args:
            model: the model.
            session: the conversation's requests of engines.
            history: the tokens so far.
            tools: schemas of the tools that the model may call.
            sampling: parameters of the prompt's source, by name.
            seed: seed of the model's messages.
            seconds: returns the time that is left.
        """
        self.history = history
        """Tokens so far."""
        self._model = model
        self._session = session
        self._tools = tools
        self._own_sampling = sampling
        self._budget = sampling.get("max_new_tokens") or model.config.rollout.max_new_tokens
        self._seed = seed
        self._seconds = seconds
        self._count = 0
        """Number of the model's messages."""
        self._calls = 0
        """Number of calls in the messages."""

    @property
    def room(self) -> int:
        """Number of tokens that the history may still have."""
        above = max(0, len(self.history.prompt_tokens) - self._model.config.data.max_prompt_tokens)
        return self._budget - above - self.history.length

    async def add_messages(self, messages: Sequence[Message], media: Sequence[StoredMedia] = ()) -> None:
        """Append the messages after the model's, with their media. Raises CannotContinue."""
        await in_thread_if_long(messages, partial(self.history.add_messages, messages, media))

    async def write(
        self, most: int | None = None, stop: Sequence[str] = (), *, stop_tokens: Sequence[int] = (), calls: bool = True
    ) -> ModelMessage:
        """Have the model write its next message, and append it to the history. There must be `room`.

        Args:
            most: its maximum length in tokens, besides the run's limits.
            stop: texts that end it, besides the run's.
            stop_tokens: ids of tokens that do so.
            calls: whether tool calls are read in it.

        Raises as `RunEngines.generate` does.
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
    """Return the names of tools."""
    return [str(dict(tool.get("function", tool)).get("name")) for tool in tools]


def span_attributes(session: str, turn: int) -> dict[str, str | int]:
    """Return the attributes of a turn's spans; turn 0 is the opening."""
    return {"relaxd.session_id": session, "relaxd.turn": turn}


async def in_thread_if_long(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """Encode messages, in a thread if they are long, so that other conversations continue."""
    if sum(len(str(message.get("content"))) for message in messages) < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)


def sampling_of(config: RunConfig, own: Mapping[str, Any], most: int, seed: int) -> SamplingParams:
    """Return the sampling parameters of a message.

    Args:
        config: the run.
        own: parameters of the prompt's source, by name.
        most: its maximum length in tokens.
        seed: its seed.
    """
    names = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_new_tokens")
    values = {name: own.get(name, getattr(config.rollout, name)) for name in names}
    values["min_new_tokens"] = min(values["min_new_tokens"], most)
    return SamplingParams(**values, max_new_tokens=most, seed=seed)
