"""Conversations of the model with an environment. Each is a sample of a group."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from opentelemetry.trace import Span

from relaxd import telemetry
from relaxd.data.examples import Example, Message
from relaxd.data.vision import normalise_shown
from relaxd.envs.client import EnvironmentFailed
from relaxd.envs.environment import Reply, Sample
from relaxd.envs.observation_media import with_media
from relaxd.envs.replies import ParsedReply
from relaxd.envs.token_history import CannotContinue, TokenHistory
from relaxd.media.placeholders import MediaItem
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia, StoredMedia, hashes_of, with_references, without_missing
from relaxd.media.sources import MediaError
from relaxd.models import DataError
from relaxd.seeds import seed_of
from relaxd.weights.receipts import Receipt
from services.agent.engines import EngineSession, OutOfTime, RequestTooLarge, WantedWeights
from services.agent.environments import Environments
from services.agent.model_turns import (
    BadPrompt,
    ModelMessage,
    ModelTurns,
    PolicyModel,
    PromptTooLong,
    in_thread_if_long,
    span_attributes,
    tool_names,
)

MAX_INFO = 64
"""Maximum number of entries of an environment's `info` that a conversation stores."""


@dataclass
class ConversationTokens:
    """Tokens of a sequence after the prompt on the board, in the columns of `relaxd.board.schema`."""

    shares_prompt: bool = True
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    message_lengths: list[int] = field(default_factory=list)
    """For each message of the model: number of tokens since the end of the previous message, or since the beginning."""
    media: list[StoredMedia] = field(default_factory=list)
    """Media among the tokens, with their positions."""

    @classmethod
    def of(cls, history: TokenHistory, published: Sequence[int], hashes: Sequence[str]) -> "ConversationTokens":
        """Copy a history up to the model's last reply. The prompt's tokens are included only if they differ from
        `published`.

        `published` has the token ids of the prompt on the board, and `hashes` the hashes of its media, which are also
        compared because different media may have equal tokens.
        """
        own, columns, media = list(history.prompt_tokens), history.to_last_reply(), history.media_to_last_reply
        versions = columns["versions"]
        of_prompt = [item.sha256 for item in media if (item.begin or 0) < len(own)]
        if (own == list(published) and of_prompt == list(hashes)) or not len(versions):
            shifted = [item.shifted(-len(own)) for item in media]
            behind = [item for item in shifted if (item.begin or 0) >= 0]
            return cls(True, **columns, message_lengths=history.reply_lengths(), media=behind)
        before = {
            "tokens": np.array(own, np.int32),
            "loss_mask": np.zeros(len(own), np.uint8),
            "logprobs": np.zeros(len(own), np.float32),
            "versions": np.full(len(own), versions[0], np.int64),
        }
        first, *others = history.reply_lengths()
        whole = {name: np.concatenate([before[name], column]) for name, column in columns.items()}
        return cls(False, **whole, message_lengths=[len(own) + first, *others], media=media)


@dataclass
class Conversation:
    """Messages, rewards and counts of a conversation, and how it ended."""

    sequences: dict[int, ConversationTokens] = field(default_factory=lambda: {0: ConversationTokens()})
    """Tokens of each history up to the end of the model's last message, set at the conversation's end."""
    histories: dict[int, TokenHistory] = field(default_factory=dict)
    """Token history in each player's view; with programs and functions, histories by number. Cleared at the end."""
    player_rewards: dict[int, float] = field(default_factory=dict)
    """Sum of the environment's rewards for each player."""
    steps: list[tuple[int, Mapping[int, float]]] = field(default_factory=list)
    """For each message that the environment answered: the player who wrote it, and the rewards by player."""
    messages: list[Message] = field(default_factory=list)
    """All messages after the prompt."""
    text: str = ""
    """Text of the model's last message."""
    finish: str = ""
    """Reason why the conversation ended, from relaxd.reasons."""
    failure: str = ""
    """Reason why the environment failed; empty if it didn't."""
    turns: int = 0
    reward: float = 0.0
    """Sum of the environment's rewards for all players, or the reward from the program or function."""
    info: dict[str, float] = field(default_factory=dict)
    """Values from the environment's `info`: the last value of each name."""
    environment_seconds: float = 0.0

    receipts: Sequence[Receipt] = ()
    """Receipts for the weights that generated the model's messages, set at the conversation's end."""
    outside_seconds: float = 0.0
    """Seconds that the conversation spent outside requests to engines."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Number of calls of unknown tools, plus number of messages with an unreadable call."""

    def add_reply(self, message: ModelMessage, tools: Collection[str]) -> None:
        """Add a message of the model. `tools` are the names of the tools that it may call."""
        self.count_calls(message.parsed, tools)
        self.text = message.text
        calls = {"tool_calls": message.parsed.message["tool_calls"]} if message.parsed.calls else {}
        self.messages.append({"role": "assistant", "content": message.text, **calls})
        self.turns += 1

    def add_rewards(self, speaker: int, rewards: Mapping[int, float]) -> None:
        """Add the players' rewards for a message that player `speaker` wrote."""
        self.steps.append((speaker, rewards))
        for player, reward in rewards.items():
            self.player_rewards[player] = self.player_rewards.get(player, 0.0) + reward
        self.reward += sum(rewards.values())

    def returns(self, player: int) -> list[float]:
        """Return, for each message of a player, the sum of the player's rewards from this message on."""
        after, returns = 0.0, []
        for speaker, rewards in reversed(self.steps):
            after += rewards.get(player, 0.0)
            if speaker == player:
                returns.append(after)
        return returns[::-1]

    @property
    def model_tokens(self) -> int:
        """Number of tokens that the model wrote. Valid only after the conversation's end."""
        return sum(int(np.count_nonzero(one.loss_mask)) for one in self.sequences.values())

    def count_calls(self, reply: ParsedReply, tools: Collection[str]) -> None:
        """Count the tool calls in a message.

        Without `tools` any name is valid, because the environment parses calls itself.
        """
        self.tool_calls += len(reply.calls)
        unknown = [call for call in reply.calls if tools and call.name not in tools]
        self.tool_errors += len(unknown) + bool(reply.problem)


@dataclass(frozen=True)
class ConversationStart:
    """Inputs of a conversation: prompt, seeds, time limit and the session with engines."""

    engine: EngineSession
    """The conversation's session with engines. It has the conversation's name."""
    example: Example
    """The conversation's prompt."""
    group_seed: int
    """Seed for the environment or the program, the same for all samples of a group."""
    sample_seed: int
    """Seed for the model's messages of this sample."""
    seconds: Callable[[], float]
    """Function that returns how many seconds the conversation may still take."""
    media: Sequence[StoredMedia] = ()
    """Media of the prompt."""

    async def turns(
        self,
        model: PolicyModel,
        example: Example,
        tools: Sequence[Mapping[str, Any]],
        opened: Sequence[Message],
        branch: int = 0,
        tokens: Sequence[int] = (),
        *,
        media: Sequence[StoredMedia] = (),
    ) -> ModelTurns:
        """Begin a token history with a prompt, and return the model's turns that continue it.

        Args:
            model: the model.
            example: the sample's prompt, or its replacement.
            tools: schemas of the tools that the model may call.
            opened: messages after the prompt.
            branch: number of this history of the sample, from 0 on. Only the prompt of history 0 is limited to
                data.max_prompt_tokens; in others, tokens above this limit reduce `room`.
            tokens: the prompt's token ids, instead of example, tools and messages.
            media: media of `opened`.

        Raises:
            BadPrompt, CannotContinue, DataError: the conversation can't begin.
        """
        if tools and model.form is None:
            raise BadPrompt(
                f"there are tools ({', '.join(tool_names(tools))}), but the chat template has no form of tool calls "
                "that relaxd reads (docs/conversations.md): set model.chat_template to one that has"
            )
        items = [*self.media_of(example), *media]
        history = await in_thread_if_long(
            opened, partial(TokenHistory, model.tokenizer, example, tools, opened=opened, media=items, tokens=tokens)
        )
        most = model.config.data.max_prompt_tokens
        if (count := len(history.prompt_tokens)) > most and not branch:
            raise PromptTooLong(
                f"with the tools and messages that are added to it, the prompt has {count} tokens: "
                f"data.max_prompt_tokens is {most}"
            )
        seed = seed_of(self.sample_seed, "branch", branch) if branch else self.sample_seed
        own = example.sampling
        return ModelTurns(model, self.engine, history, tools=tools, sampling=own, seed=seed, seconds=self.seconds)

    def media_of(self, example: Example) -> Sequence[StoredMedia]:
        """Return the prompt's media if `example` is the sample's own prompt; else none."""
        return self.media if example is self.example else ()

    @property
    def sample(self) -> Sample:
        """The sample in the form that environments and programs get."""
        example = self.example
        messages = with_media(example.messages, [item.uri for item in self.media])
        return Sample(messages, example.answer, example.metadata, self.group_seed, example.tools)


class Conversations(ABC):
    """Base class. Holds conversations of one run with an environment, program or function."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self.calls = 0
        """Number of calls and checks of the environment or program so far.

        It grows while the replica makes progress.
        """
        self.open_calls: dict[str, float] = {}
        """Monotonic start time of the environment's running call, by session id."""

    async def hold(
        self,
        name: str,
        example: Example,
        published: Sequence[int],
        group_seed: int,
        sample_seed: int,
        wanted: WantedWeights | None = None,
        *,
        media: PromptMedia = NO_MEDIA,
    ) -> Conversation:
        """Hold a conversation to its end.

        Args:
            name: id of the session, unique in the run.
            example: the prompt.
            published: the prompt's token ids on the board.
            group_seed: seed of the environment or the program.
            sample_seed: seed of the model's messages.
            wanted: weights that engines must serve; None for any.
            media: the prompt's media.

        Raises:
            BadPrompt: the conversation can't begin or continue.
            RefusedPrompt, grpc.aio.AioRpcError: see `RunEngines.generate`.
        """
        result = Conversation()
        engine, begun = EngineSession(name, wanted), time.monotonic()
        limit = self._model.config.agent.conversation_seconds

        def seconds() -> float:
            return limit - (time.monotonic() - begun - engine.waited_seconds)

        try:
            own = media.items()
            await self._converse(result, ConversationStart(engine, example, group_seed, sample_seed, seconds, own))
        except OutOfTime:
            result.finish = "timeout"
        except (EnvironmentFailed, RequestTooLarge) as error:
            result.finish, result.failure = "env_failed", str(error)
        except (CannotContinue, DataError, MediaError) as error:
            raise BadPrompt(str(error)) from error
        finally:
            result.receipts = sorted(engine.receipts)
            result.outside_seconds = time.monotonic() - begun - engine.asked_seconds
            self._end(name)
        if result.histories:
            result.sequences = {
                key: ConversationTokens.of(history, published, hashes_of(media.records))
                for key, history in result.histories.items()
            }
            result.histories = {}
        # Media that the model never saw aren't stored.
        seen = {item.sha256 for one in result.sequences.values() for item in one.media}
        result.messages = without_missing(result.messages, seen.union(hashes_of(media.records)))
        return result

    @abstractmethod
    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        """Hold the conversation to its end, and add its messages, rewards and counts to `result`."""

    @abstractmethod
    def _end(self, name: str) -> None:
        """Release the resources of session `name` in the background."""


class EnvironmentConversations(Conversations):
    """Holds conversations between the model and an environment."""

    def __init__(self, model: PolicyModel, environments: Environments) -> None:
        super().__init__(model)
        self._environments = environments

    def _end(self, name: str) -> None:
        self._environments.close_session(name)

    @contextmanager
    def _timed(self, result: Conversation, call: str, session: str) -> Iterator[Span]:
        """Count the environment's call in the block and its time, and record a span."""
        begun = self.open_calls[session] = time.monotonic()
        try:
            with telemetry.part_span(f"environment {call}", span_attributes(session, result.turns)) as span:
                yield span
        finally:
            result.environment_seconds += time.monotonic() - begun
            self.calls += 1
            del self.open_calls[session]

    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        name, seconds = start.engine.name, start.seconds
        with self._timed(result, "open", name):
            opened = await self._environments.open(name, start.sample)
        tools = [*start.example.tools, *opened.tools]
        names = tool_names(tools)
        media = await self._normalised(opened.media, start.media)
        players = {0: await start.turns(self._model, start.example, tools, opened.messages, media=media)}
        player = 0
        result.messages += with_references(opened.messages, media)
        while not result.finish:
            turns = players[player]
            if turns.room < 1:
                result.finish = "budget"
                return
            message = await turns.write()
            result.histories[player] = turns.history
            result.add_reply(message, names)
            parsed = message.parsed
            said = Reply(parsed.text, parsed.calls, parsed.problem, "length" if message.cut_by else "stop")
            with self._timed(result, "step", name) as span:
                step = await self._environments.step(name, result.turns, said)
                span.set_attribute("relaxd.reward", step.reward)
            result.add_rewards(player, {**step.rewards, player: step.reward + step.rewards.get(player, 0.0)})
            result.info |= dict(list(step.info.items())[:MAX_INFO])
            if step.done:
                result.finish = "env_done"
            elif message.cut_by:
                result.finish = message.cut_by
            elif result.turns >= self._model.config.agent.max_turns:
                result.finish = "turns"
            elif not step.messages:
                result.finish = "stop"
            if result.finish or seconds() <= 0:
                result.messages += step.messages
                if not result.finish:
                    raise OutOfTime
                return
            media = await self._normalised(step.media, start.media)
            result.messages += with_references(step.messages, media)
            player = self._checked_player(step.player)
            if player in players:
                await players[player].add_messages(step.messages, media)
            else:
                begun = start.turns(self._model, start.example, tools, step.messages, branch=player, media=media)
                players[player] = await begun

    async def _normalised(self, items: Sequence[MediaItem], prompt: Sequence[StoredMedia]) -> list[StoredMedia]:
        """Return the environment's media, normalised for the model. Media of the prompt are already normalised.

        Raises EnvironmentFailed.
        """
        if not items:
            return []
        vision = self._model.tokenizer.vision
        known = {(one.kind, one.uri): one for one in prompt}

        def normalise_all() -> list[StoredMedia]:
            found = []
            for item in items:
                own = known.get((item.kind, item.source)) if isinstance(item.source, str) else None
                try:
                    found.append(own or StoredMedia.of(normalise_shown(item.kind, item.source, vision)))
                except MediaError as error:
                    raise EnvironmentFailed(f"the environment's {item.kind} {item.place} {error}") from error
            return found

        return await asyncio.to_thread(normalise_all)

    def _checked_player(self, player: int) -> int:
        """Return the number of a player. Raises EnvironmentFailed if it is out of range."""
        if 0 <= player < (count := self._model.config.agent.players):
            return player
        raise EnvironmentFailed(f"player {player} is to speak next, but agent.players is {count}: set it to more")
