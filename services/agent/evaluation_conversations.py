"""Conversations of evaluations. The coordinator requests them, one prompt per call."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Collection, Mapping
from dataclasses import replace
from typing import Any

from relaxd.config import AgentConfig
from relaxd.data.examples import Example
from relaxd.finish_reasons import ENV_FAILED
from relaxd.media.messages import to_proto
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.rpc.errors import Unavailable
from relaxd.rpc.message_parts import numbers
from relaxd.seeds import seed_of
from relaxd.v1.agent_pb2 import ConverseResponse
from relaxd.v1.reward_pb2 import EnvironmentOutcome
from relaxd.v1.sample_pb2 import FinishReason, SamplingParams
from services.agent.conversation import Conversation, Conversations
from services.agent.engines import RefusedPrompt, WantedWeights
from services.agent.group_conversations import hold_with_retries
from services.agent.model_turns import BadPrompt


class EvaluationConversations:
    """Holds the conversations of a run's evaluations."""

    def __init__(
        self,
        agent: AgentConfig,
        by_set: Mapping[str, Conversations],
        places: asyncio.Semaphore,
        opened: Collection[str] = (),
    ) -> None:
        """`by_set`: conversations by evaluation set; `places`: limits concurrent conversations.

        `opened`: names of sets whose rewards may open media.
        """
        self._agent = agent
        self._opened = opened
        self._by_set = by_set
        self._places = places
        self._running: set[asyncio.Task[ConverseResponse]] = set()

    @property
    def sets(self) -> list[str]:
        """Names of the run's evaluation sets."""
        return sorted(self._by_set)

    @property
    def unfinished(self) -> int:
        """Number of conversations that haven't ended."""
        return len(self._running)

    async def hold(
        self,
        name: str,
        example: Example,
        count: int,
        sampling: SamplingParams,
        wanted: WantedWeights,
        media: PromptMedia = NO_MEDIA,
    ) -> AsyncIterator[ConverseResponse]:
        """Yield conversations about a prompt, each once it has ended.

        Args:
            name: name of the evaluation set.
            example: the prompt.
            count: number of conversations.
            sampling: sampling parameters of the model's messages.
            wanted: weights that engines must serve.
            media: the prompt's media.

        Raises:
            Unavailable: `cancel` was called.
            grpc.aio.AioRpcError: an engine failed.
        """
        own = {field.name: _plain(getattr(sampling, field.name)) for field in sampling.DESCRIPTOR.fields}
        example = replace(example, sampling=own)
        tasks = [
            asyncio.create_task(self._hold(name, example, sample, sampling.seed, wanted, media))
            for sample in range(count)
        ]
        self._running.update(tasks)
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        except asyncio.CancelledError as error:
            if (caller := asyncio.current_task()) is not None and caller.cancelling():
                raise
            raise Unavailable("this replica ends, or changes to another run: ask another one") from error
        finally:
            for task in tasks:
                task.cancel()
            self._running.difference_update(tasks)

    def cancel(self) -> None:
        """Cancel all conversations. Their callers may repeat them at other replicas."""
        for task in self._running:
            task.cancel()

    async def _hold(
        self, name: str, example: Example, sample: int, seed: int, wanted: WantedWeights, media: PromptMedia
    ) -> ConverseResponse:
        conversations = self._by_set[name]
        session = f"evaluation/{name}/{sample}/{uuid.uuid4().hex}"

        def hold_once(session: str) -> Awaitable[Conversation]:
            return conversations.hold(session, example, [], seed, seed_of(seed, sample), wanted, media=media)

        try:
            held = await hold_with_retries(self._agent, self._places, session, hold_once)
        except (BadPrompt, RefusedPrompt) as error:
            held = Conversation(finish=ENV_FAILED, failure=str(error))
        return ConverseResponse(
            sample=sample,
            finish_reason=numbers(FinishReason)[held.finish],
            text=held.text,
            token_count=held.model_tokens,
            messages=to_proto(held.messages),
            outcome=EnvironmentOutcome(reward=held.reward, info=held.info),
            turns=held.turns,
            failure=held.failure,
            media={item.sha256: item.content for one in held.sequences.values() for item in one.media}
            if name in self._opened
            else {},
        )


def _plain(value: Any) -> Any:
    """Return a field's value, as a list if the field is repeated."""
    return value if isinstance(value, int | float) else list(value)
