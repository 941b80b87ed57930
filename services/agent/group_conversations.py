"""The rollout stage of runs whose samples are conversations."""

import asyncio
import itertools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import Any, Literal

import numpy as np

from relaxd import telemetry
from relaxd.board import (
    ENVIRONMENT_INFO,
    ENVIRONMENT_REWARD,
    ENVIRONMENT_SECONDS,
    MESSAGE_RETURNS,
    OUTSIDE_SECONDS,
    PLAYER,
    RESPONSE_MESSAGES,
    SEQUENCE_CONTENTS,
    SEQUENCE_MEDIA,
    SEQUENCE_REWARD,
    TOOL_CALLS,
    TOOL_ERRORS,
    TURNS,
    WEIGHT_RECEIPTS,
    BoardUnavailable,
    Column,
    Delivery,
    Drop,
    DropReason,
)
from relaxd.board.worker import Result
from relaxd.config import AgentConfig, RunConfig
from relaxd.data.examples import Example
from relaxd.media.prompt_media import PromptMedia, hashes_of, to_sequence_columns
from relaxd.seeds import seed_of
from relaxd.waiting import Backoff, waiting
from services.agent.conversation import Conversation, Conversations
from services.agent.engines import RefusedPrompt, RunEngines
from services.agent.model_turns import BadPrompt, PromptTooLong

Credit = Literal["sample", "sequence", "step"]
RETRY_PAUSE = Backoff(first_seconds=0.5, max_seconds=10.0)
"""Pauses before a failed conversation is repeated (agent.on_failure = "retry")."""

logger = logging.getLogger(__name__)


class GroupConversations:
    """Holds the conversations of a run's groups."""

    def __init__(
        self,
        config: RunConfig,
        begin: Callable[[Delivery, int], bool],
        engines: RunEngines,
        conversations: Conversations,
        places: asyncio.Semaphore,
        ended: Callable[[], None],
    ) -> None:
        """Prepare to hold the conversations of a run's groups.

        `begin(delivery, version)` reports to the board the oldest weight version that may generate a group; it returns
        False if another replica has the group. `places` limits concurrent conversations of the replica, including those
        of evaluations. `ended` is called after each conversation, because another group may fit then.
        """
        self._config = config
        self._begin = begin
        self._engines = engines
        self._conversations = conversations
        self._loop = asyncio.get_running_loop()
        self._places = places
        self._ended = ended
        self._unfinished: dict[str, int] = {}
        """Number of unfinished conversations by group id."""
        self._running: set[Future[Result]] = set()

    def room(self, held: int, others: int) -> int:
        """Return the maximum number of groups that this replica should hold.

        agent.max_sessions limits samples. Another group may be held as soon as one of its samples fits; its other
        samples wait. If all samples of a group had to fit, some of the limit would always be unused.

        `held`: number of groups held now; `others`: number of samples of evaluations.
        """
        per_group = self._config.rollout.samples_per_prompt
        unfinished = list(self._unfinished.values())
        samples = others + sum(unfinished) + per_group * max(0, held - len(unfinished))
        return max(held + math.ceil((self._config.agent.max_sessions - samples) / per_group), 1)

    def process(self, delivery: Delivery, columns: dict[str, Column]) -> "Future[Result]":
        """Start to hold a group's conversations, and return a future of the result.

        Called in the stage worker's threads.
        """
        future = asyncio.run_coroutine_threadsafe(self._hold_group(delivery, columns), self._loop)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def cancel(self) -> None:
        """Cancel the conversations of all groups, after the groups were handed back."""
        for future in list(self._running):
            future.cancel()

    async def _hold_group(self, delivery: Delivery, columns: dict[str, Column]) -> Result:
        prompt, published = columns["prompt"], np.asarray(columns["prompt_tokens"]).tolist()
        assert isinstance(prompt, dict)
        media = PromptMedia.of_columns(columns)
        count = self._config.rollout.samples_per_prompt
        self._unfinished[delivery.group_id] = count
        try:
            oldest = await self._engines.oldest_version()
            if not await asyncio.to_thread(self._begin, delivery, oldest):
                raise asyncio.CancelledError  # another replica has it
            async with asyncio.TaskGroup() as tasks:
                held = [
                    tasks.create_task(self._hold(delivery, example_of(prompt), published, sample, media))
                    for sample in range(count)
                ]
            conversations = await asyncio.gather(*held)  # they have ended
            if not any(one.model_tokens for one in conversations):
                reasons = sorted({one.failure or one.finish for one in conversations})
                failed = _Failed(f"no conversation has a message of the model: {'; '.join(reasons)}")
                return self._dropped(delivery, failed)
            agent = self._config.agent
            made = columns_of(conversations, masked=agent.on_failure == "mask", credit=agent.credit)
            if self._config.weights.has_receipts:
                made[WEIGHT_RECEIPTS] = [one.receipts for one in conversations]
            return made | media_columns_of(conversations, media) if self._config.has_media else made
        except BoardUnavailable as error:
            raise asyncio.CancelledError from error  # not the group's fault: handed back, uncounted
        except ExceptionGroup as errors:  # the first failure has ended the other conversations
            return self._dropped(delivery, errors.exceptions[0])
        finally:
            self._unfinished.pop(delivery.group_id, None)

    async def _hold(
        self, delivery: Delivery, example: Example, published: Sequence[int], sample: int, media: PromptMedia
    ) -> Conversation:
        """Hold a sample's conversation.

        Raises _Failed if it fails, unless agent.on_failure keeps failed conversations.
        """
        agent, seed = self._config.agent, seed_of(self._config.run.seed, delivery.group_id)

        def hold(name: str) -> Awaitable[Conversation]:
            return self._conversations.hold(name, example, published, seed, seed_of(seed, sample), media=media)

        name = f"{delivery.group_id}/{sample}/{delivery.attempt}"
        conversation = await hold_with_retries(agent, self._places, name, hold)
        if conversation.failure:
            is_kept = agent.on_failure in ("zero", "mask")
            _count(agent.on_failure if is_kept else "dropped")
            if not is_kept:
                raise _Failed(conversation.failure)
        self._unfinished[delivery.group_id] -= 1
        self._ended()
        return conversation

    def _dropped(self, delivery: Delivery, error: Exception) -> Drop:
        """Return a drop with the reason for a known failure of a group. Raises any other failure."""
        match error:
            case PromptTooLong() | RefusedPrompt(is_too_long=True):
                reason = DropReason.PROMPT_TOO_LONG
            case RefusedPrompt():
                reason = DropReason.BAD_PROMPT
            case _Failed() | BadPrompt():
                reason = DropReason.ENVIRONMENT_FAILED
            case _:
                raise error
        logger.warning("dropping group %s as %s: %s", delivery.group_id, reason, error)
        return Drop(reason, detail=str(error))


class _Failed(Exception):
    """The environment failed in a conversation, so its group is dropped."""


async def hold_with_retries(
    agent: AgentConfig, places: asyncio.Semaphore, name: str, hold: Callable[[str], Awaitable[Conversation]]
) -> Conversation:
    """Hold a conversation. If agent.on_failure = "retry", repeat it while it fails, up to agent.max_retries times.

    Args:
        agent: the run's [agent] table.
        places: limits concurrent conversations.
        name: id of the first attempt's session; ids of repetitions have a number appended.
        hold: holds the conversation once, given the session's id.
    """
    retries = agent.max_retries if agent.on_failure == "retry" else 0
    for failures in itertools.count(1):
        async with places:
            conversation = await hold(name + (f"/{failures}" if failures > 1 else ""))
        if conversation.failure:
            logger.warning("conversation %s: %s", name, conversation.failure)
        if not conversation.failure or failures > retries:
            break
        _count("retried")
        with waiting("holding a failed conversation again"):
            await asyncio.sleep(RETRY_PAUSE.pause(failures))
    return conversation


def _count(outcome: str) -> None:
    telemetry.record("agent.failures", 1, {"relaxd.outcome": outcome})


def example_of(prompt: Mapping[str, Any]) -> Example:
    """Return the example that the column `prompt` of a group contains."""
    return Example(
        prompt.get("messages") or prompt["text"],
        prompt.get("answer", ""),
        prompt.get("metadata", {}),
        prompt.get("sampling", {}),
        prompt.get("tools", []),
        f"prompt {prompt.get('index', '')}".strip(),
    )


def columns_of(conversations: Sequence[Conversation], *, masked: bool, credit: Credit = "sample") -> dict[str, Column]:
    """Return the columns that the rollout stage writes for a group, except those of media and receipts.

    Args:
        conversations: the group's conversations; at least one.
        masked: True if failed conversations are not trained on.
        credit: unit to which rewards are credited (agent.credit).
    """
    # Text and finish are equal in all sequences of a sample: rewards and statistics use those of the last one.
    places, samples, players = zip(
        *((place, one, player) for place, one in enumerate(conversations) for player in one.sequences), strict=True
    )
    tokens = [sequence for one in conversations for sequence in one.sequences.values()]
    masks = [
        np.zeros_like(sequence.loss_mask) if masked and one.failure else sequence.loss_mask
        for one, sequence in zip(samples, tokens, strict=True)
    ]
    versions = [one.versions[one.loss_mask != 0] for one in tokens]
    names = dict.fromkeys(name for one in conversations for name in one.info)
    of_credit: dict[str, Column] = {} if credit == "sample" else {PLAYER: np.array(players, np.int32)}
    if credit == "sequence":
        rewards = [
            0.0 if one.failure else one.player_rewards.get(player, 0.0)
            for one, player in zip(samples, players, strict=True)
        ]
        of_credit[SEQUENCE_REWARD] = np.array(rewards, np.float64)
    if credit == "step":
        of_credit[MESSAGE_RETURNS] = [
            [
                [length, 0.0 if one.failure else following]
                for length, following in zip_longest(sequence.message_lengths, one.returns(player), fillvalue=0.0)
            ]
            for one, player, sequence in zip(samples, players, tokens, strict=True)
        ]
    return {
        "tokens": np.concatenate([one.tokens for one in tokens]),
        "sample_of_sequence": np.array(places, np.int32),
        "lengths": np.array([len(one.tokens) for one in tokens], np.int32),
        "shares_prompt": np.array([one.shares_prompt for one in tokens], np.uint8),
        "loss_mask": np.concatenate(masks),
        "rollout_logprobs": np.concatenate([one.logprobs for one in tokens]),
        "versions": np.concatenate([one.versions for one in tokens]),
        "finish": [one.finish for one in samples],
        "text": [one.text for one in samples],
        "spans_weight_update": np.array([len(np.unique(one)) > 1 for one in versions], np.uint8),
        RESPONSE_MESSAGES: [one.messages for one in conversations],
        ENVIRONMENT_REWARD: np.array([one.reward for one in conversations], np.float64),
        ENVIRONMENT_INFO: {name: [one.info.get(name) for one in conversations] for name in names},
        TURNS: np.array([one.turns for one in conversations], np.int32),
        ENVIRONMENT_SECONDS: np.array([one.environment_seconds for one in conversations], np.float32),
        OUTSIDE_SECONDS: np.array([one.outside_seconds for one in conversations], np.float32),
        TOOL_CALLS: np.array([one.tool_calls for one in conversations], np.int32),
        TOOL_ERRORS: np.array([one.tool_errors for one in conversations], np.int32),
        **of_credit,
    }


def media_columns_of(conversations: Sequence[Conversation], prompt: PromptMedia) -> dict[str, Column]:
    """Return the columns of the media in a group's conversations. `prompt`: media of the prompt, which are already
    stored."""
    sequences = [sequence.media for one in conversations for sequence in one.sequences.values()]
    records, contents = to_sequence_columns(sequences, hashes_of(prompt.records))
    return {SEQUENCE_MEDIA: records, SEQUENCE_CONTENTS: contents}
