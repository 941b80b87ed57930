"""A conversation of the model with the environment: a sample of a group."""

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
"""Maximum number of an environment's numbers that a conversation stores."""


@dataclass
class ConversationTokens:
    """Tokens after the published prompt, in the columns of `relaxd.board.schema`."""

    shares_prompt: bool = True
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    message_lengths: list[int] = field(default_factory=list)
    """Numbers of tokens from the end of each message of the model, or from the beginning, to the end of the next."""
    media: list[StoredMedia] = field(default_factory=list)
    """Media in the tokens, with their positions."""

    @classmethod
    def of(cls, history: TokenHistory, published: Sequence[int], hashes: Sequence[str]) -> "ConversationTokens":
        """Copy a history up to its last reply. If its prompt differs from the published one, the tokens begin with it.

        `hashes`: the published prompt's media, which are compared as well, because other media may have equal tokens.
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
    """A conversation so far."""

    sequences: dict[int, ConversationTokens] = field(default_factory=lambda: {0: ConversationTokens()})
    """Tokens of each history up to the end of its last message of the model, once the conversation has ended."""
    histories: dict[int, TokenHistory] = field(default_factory=dict)
    """Histories until then, by the player from whose view they are; a program's in the order of their beginning."""
    player_rewards: dict[int, float] = field(default_factory=dict)
    """Sums of the environment's rewards by player."""
    steps: list[tuple[int, Mapping[int, float]]] = field(default_factory=list)
    """Player of each of the model's messages that the environment answered, and its rewards by player."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt."""
    text: str = ""
    """Text of the model's last message."""
    finish: str = ""
    """Reason of the end, by relaxd.finish_reasons."""
    failure: str = ""
    """Reason why the environment failed, if it did."""
    turns: int = 0
    reward: float = 0.0
    """Sum of the environment's rewards."""
    info: dict[str, float] = field(default_factory=dict)
    """The environment's numbers; the last value of each name."""
    environment_seconds: float = 0.0

    receipts: Sequence[Receipt] = ()
    """Receipts for the weights that wrote the model's messages, once the conversation has ended."""
    outside_seconds: float = 0.0
    """Time outside requests to engines."""
    tool_calls: int = 0
    tool_errors: int = 0
    """Calls that name no tool, and messages with a call that can't be read."""

    def add_reply(self, message: ModelMessage, tools: Collection[str]) -> None:
        """Add a message of the model, which may call the tools of these names."""
        self.count_calls(message.parsed, tools)
        self.text = message.text
        calls = {"tool_calls": message.parsed.message["tool_calls"]} if message.parsed.calls else {}
        self.messages.append({"role": "assistant", "content": message.text, **calls})
        self.turns += 1

    def add_rewards(self, speaker: int, rewards: Mapping[int, float]) -> None:
        """Add the rewards of players, by number, for a message of one of them."""
        self.steps.append((speaker, rewards))
        for player, reward in rewards.items():
            self.player_rewards[player] = self.player_rewards.get(player, 0.0) + reward
        self.reward += sum(rewards.values())

    def returns(self, player: int) -> list[float]:
        """Return the sum of a player's rewards from each of its messages on."""
        after, returns = 0.0, []
        for speaker, rewards in reversed(self.steps):
            after += rewards.get(player, 0.0)
            if speaker == player:
                returns.append(after)
        return returns[::-1]

    @property
    def model_tokens(self) -> int:
        """Number of tokens that the model wrote, once the conversation has ended."""
        return sum(int(np.count_nonzero(one.loss_mask)) for one in self.sequences.values())

    def count_calls(self, reply: ParsedReply, tools: Collection[str]) -> None:
        """Count the tool calls of a message. Without tools the environment parses calls itself, with any names."""
        self.tool_calls += len(reply.calls)
        unknown = [call for call in reply.calls if tools and call.name not in tools]
        self.tool_errors += len(unknown) + bool(reply.problem)


@dataclass(frozen=True)
class ConversationStart:
    """The beginning of a conversation."""

    engine: EngineSession
    """The conversation's requests to engines; also has the engine's name."""
    example: Example
    """The prompt."""
    group_seed: int
    """Seed of the environment or of the program."""
    sample_seed: int
    """Seed of the model's messages."""
    seconds: Callable[[], float]
    """Function that returns the remaining seconds."""
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
        """Return the model's turns after a prompt.

        Args:
            model: the model.
            example: the prompt, or what stands in its place.
            tools: schemas of the tools that the model may call.
            opened: messages that follow the prompt's.
            branch: number of this history of the sample, from 0 on. Only the first one's prompt is limited to
                data.max_prompt_tokens; what others have above takes `room`.
            tokens: the prompt's token ids, in place of example, tools and messages.
            media: media of `opened`.

        Raises:
            BadPrompt, CannotContinue, DataError: it can't begin.
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
        """Return the media of a prompt; none if the prompt stands in for the sample's."""
        return self.media if example is self.example else ()

    @property
    def sample(self) -> Sample:
        """The sample in the form for environments and programs."""
        example = self.example
        messages = with_media(example.messages, [item.uri for item in self.media])
        return Sample(messages, example.answer, example.metadata, self.group_seed, example.tools)


class Conversations(ABC):
    """Holds conversations of one run."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self.calls = 0
        """A counter that shows that the replica isn't stuck."""
        self.open_calls: dict[str, float] = {}
        """Monotonic times at which the present calls of the environment began, by session."""

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
            name: id of the session, unique among those of the run.
            example: the prompt.
            published: the prompt's token ids on the board.
            group_seed: seed of the environment or of the program.
            sample_seed: seed of the model's messages.
            wanted: weights that its engines must serve; None means any.
            media: the prompt's media.

        Raises:
            BadPrompt: it can't begin or go on.
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
        # Media that the model didn't come to see aren't stored.
        seen = {item.sha256 for one in result.sequences.values() for item in one.media}
        result.messages = without_missing(result.messages, seen.union(hashes_of(media.records)))
        return result

    @abstractmethod
    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        """Hold the conversation, and record its course in `result`."""

    @abstractmethod
    def _end(self, name: str) -> None:
        """Release a conversation's resources; nobody waits for it."""


class EnvironmentConversations(Conversations):
    """Holds conversations with an environment."""

    def __init__(self, model: PolicyModel, environments: Environments) -> None:
        super().__init__(model)
        self._environments = environments

    def _end(self, name: str) -> None:
        self._environments.close_session(name)

    @contextmanager
    def _timed(self, result: Conversation, call: str, session: str) -> Iterator[Span]:
        """Count a call of the environment and its time, and record its span."""
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
        """Return the environment's media in the model's normal form; those of the prompt have it already.

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
        """Return a player's number. Raises EnvironmentFailed: there is no such player."""
        if 0 <= player < (count := self._model.config.agent.players):
            return player
        raise EnvironmentFailed(f"player {player} is to speak next, but agent.players is {count}: set it to more")
