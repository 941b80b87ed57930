"""A conversation of the model with the environment: a sample of a group."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from opentelemetry.trace import Span

from relaxd import telemetry
from relaxd.config import RunConfig
from relaxd.data.examples import Example, Message
from relaxd.data.tokenizer import LONG_TEXT, PromptTokenizer
from relaxd.envs.client import EnvironmentFailed
from relaxd.envs.environment import Reply, Sample
from relaxd.envs.replies import ReplyFormat, read_reply
from relaxd.envs.reply_formats import ParsedReply
from relaxd.envs.token_history import CannotContinue, TokenHistory
from relaxd.models import DataError
from relaxd.seeds import seed_of
from relaxd.v1.sample_pb2 import SamplingParams
from services.agent.engines import EngineSession, OutOfTime, RunEngines, WantedWeights
from services.agent.environments import Environments

Encoded = TypeVar("Encoded")

MAX_INFO = 64
"""Maximum number of names of the environment's own numbers that a conversation keeps."""


class BadPrompt(Exception):
    """A conversation can't begin with a prompt, or can't go on by the chat template. The message says why."""


class PromptTooLong(BadPrompt):
    """With what the environment adds, a prompt is longer than data.max_prompt_tokens."""


@dataclass
class ConversationTokens:
    """Tokens after the published prompt, in the columns of `relaxd.board.schema`."""

    shares_prompt: bool = True
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))

    @classmethod
    def of(cls, history: TokenHistory, published: Sequence[int]) -> "ConversationTokens":
        """Copy a history up to its last reply. If its prompt isn't the published one, it stands before the tokens."""
        own, columns = list(history.prompt_tokens), history.to_last_reply()
        versions = columns["versions"]
        if own == list(published) or not len(versions):
            return cls(True, **columns)
        before = {
            "tokens": np.array(own, np.int32),
            "loss_mask": np.zeros(len(own), np.uint8),
            "logprobs": np.zeros(len(own), np.float32),
            "versions": np.full(len(own), versions[0], np.int64),
        }
        return cls(False, **{name: np.concatenate([before[name], column]) for name, column in columns.items()})


@dataclass
class Conversation:
    """A conversation so far."""

    tokens: ConversationTokens = field(default_factory=ConversationTokens)
    """Tokens up to the end of the model's last message, once the conversation has ended."""
    history: TokenHistory | None = None
    """Tokens until then."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt."""
    text: str = ""
    """Text of the model's last message."""
    finish: str = ""
    """Why it ended, by relaxd.finish_reasons."""
    failure: str = ""
    """Why the environment failed, if it did."""
    turns: int = 0
    reward: float = 0.0
    """Sum of the environment's rewards."""
    info: dict[str, float] = field(default_factory=dict)
    """The environment's own numbers; the last one of each name."""
    environment_seconds: float = 0.0
    outside_seconds: float = 0.0
    """Time in which no engine was asked for a message."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls that name no tool, and messages with a call that can't be read."""

    def count_calls(self, reply: ParsedReply, tools: Collection[str]) -> None:
        """Count the tool calls of a message. Without tools the environment reads calls by itself, by any name."""
        self.tool_calls += len(reply.calls)
        unknown = [call for call in reply.calls if tools and call.name not in tools]
        self.tool_errors += len(unknown) + bool(reply.problem)


class Conversations:
    """Holds conversations of one run."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: PromptTokenizer,
        form: ReplyFormat | None,
        engines: RunEngines,
        environments: Environments,
    ) -> None:
        """`form` is that of the chat template's tool calls."""
        self._config = config
        self._tokenizer = tokenizer
        self._form = form
        self._engines = engines
        self._environments = environments
        self.calls = 0
        """A counter of calls of the environment, which shows that the replica isn't stuck."""

    async def hold(
        self,
        name: str,
        example: Example,
        published: Sequence[int],
        group_seed: int,
        sample_seed: int,
        wanted: WantedWeights | None = None,
    ) -> Conversation:
        """Hold a conversation to its end.

        Args:
            name: id of the session, unique among those of the run.
            example: the prompt.
            published: the prompt's token ids on the board.
            group_seed: seed of the environment.
            sample_seed: seed of the model's messages.
            wanted: weights that its engines must serve; None means any.

        Raises:
            BadPrompt: it can't begin or go on.
            RefusedPrompt, grpc.aio.AioRpcError: see `RunEngines.generate`.
        """
        result = Conversation()
        engine, begun = EngineSession(name, wanted), time.monotonic()
        limit = self._config.agent.conversation_seconds

        def seconds() -> float:
            return limit - (time.monotonic() - begun - engine.waited_seconds)

        try:
            await self._converse(
                result, engine, example, group_seed=group_seed, sample_seed=sample_seed, seconds=seconds
            )
        except OutOfTime:
            result.finish = "timeout"
        except EnvironmentFailed as error:
            result.finish, result.failure = "env_failed", str(error)
        except (CannotContinue, DataError) as error:
            raise BadPrompt(str(error)) from error
        finally:
            result.outside_seconds = time.monotonic() - begun - engine.asked_seconds
            self._environments.close_session(name)
        if result.history is not None:
            result.tokens, result.history = ConversationTokens.of(result.history, published), None
        return result

    @contextmanager
    def _timed(self, result: Conversation, call: str, session: str) -> Iterator[Span]:
        """Count a call of the environment and its time, and record its span."""
        begun = time.monotonic()
        try:
            with telemetry.part_span(f"environment {call}", span_attributes(session, result.turns)) as span:
                yield span
        finally:
            result.environment_seconds += time.monotonic() - begun
            self.calls += 1

    async def _converse(
        self,
        result: Conversation,
        engine: EngineSession,
        example: Example,
        *,
        group_seed: int,
        sample_seed: int,
        seconds: Callable[[], float],
    ) -> None:
        agent = self._config.agent
        sample = Sample(example.messages, example.answer, example.metadata, group_seed)
        with self._timed(result, "open", engine.name):
            opened = await self._environments.open(engine.name, sample)
        tools = [*example.tools, *opened.tools]
        names = [str(dict(tool.get("function", tool)).get("name")) for tool in tools]
        if tools and self._form is None:
            raise BadPrompt(
                f"there are tools ({', '.join(names)}), but the chat template has no form of tool calls that relaxd "
                "reads (docs/conversations.md): set model.chat_template to one that has"
            )
        history = await _in_thread_if_long(
            opened.messages, partial(TokenHistory, self._tokenizer, example, tools, opened=opened.messages)
        )
        result.history = history
        if len(history.prompt_tokens) > self._config.data.max_prompt_tokens:
            raise PromptTooLong(
                f"with the environment's tools and messages the prompt has {len(history.prompt_tokens)} tokens: "
                f"data.max_prompt_tokens is {self._config.data.max_prompt_tokens}"
            )
        result.messages += opened.messages
        budget = example.sampling.get("max_new_tokens") or self._config.rollout.max_new_tokens
        while not result.finish:
            room = budget - len(history.tokens)
            if room < 1:
                result.finish = "budget"
                return
            most = min(room, agent.turn_tokens or room)
            sampling = sampling_of(self._config, example.sampling, most, seed_of(sample_seed, result.turns))
            with telemetry.part_span("turn", span_attributes(engine.name, result.turns + 1)) as span:
                reply = await self._engines.generate(engine, history.context, sampling, seconds)
                span.set_attribute("relaxd.tokens", len(reply.tokens))
            in_thinking, first = history.opens_thinking, result.tool_calls + 1
            parsed = read_reply(
                self._tokenizer, reply.tokens, self._form, tools, in_thinking=in_thinking, first_call=first
            )
            result.count_calls(parsed, names)
            history.add_reply(reply.tokens, reply.logprobs, reply.versions, parsed.message, stopped=not reply.cut)
            result.text = reply.text
            calls = {"tool_calls": parsed.message["tool_calls"]} if parsed.calls else {}
            result.messages.append({"role": "assistant", "content": reply.text, **calls})
            result.turns += 1
            said = Reply(parsed.text, parsed.calls, parsed.problem, "length" if reply.cut else "stop")
            with self._timed(result, "step", engine.name) as span:
                step = await self._environments.step(engine.name, result.turns, said)
                span.set_attribute("relaxd.reward", step.reward)
            result.reward += step.reward
            result.info |= dict(list(step.info.items())[:MAX_INFO])
            result.messages += step.messages
            if step.done:
                result.finish = "env_done"
            elif reply.cut:
                result.finish = "length" if most < room else "budget"
            elif result.turns >= agent.max_turns:
                result.finish = "turns"
            elif not step.messages:
                result.finish = "stop"
            elif seconds() <= 0:
                raise OutOfTime
            else:
                await _in_thread_if_long(step.messages, partial(history.add_messages, step.messages))


async def _in_thread_if_long(messages: Sequence[Message], encode: Callable[[], Encoded]) -> Encoded:
    """Encode messages of the environment, long ones in a thread, beside which other conversations go on."""
    if sum(len(str(message.get("content"))) for message in messages) < LONG_TEXT:
        return encode()
    return await asyncio.to_thread(encode)


def span_attributes(session: str, turn: int) -> dict[str, str | int]:
    """Return the attributes of a turn's spans; turn 0 is the opening."""
    return {"relaxd.session_id": session, "relaxd.turn": turn}


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
