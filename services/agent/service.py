"""The agent service, which works on the stage "rollout" of runs whose samples are conversations.

It also serves relaxd.v1.Agent, by which the coordinator requests conversations for evaluations, one prompt per call.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from relaxd.board import Delivery
from relaxd.board.worker import Process
from relaxd.config import AgentConfig, RunConfig
from relaxd.config.evaluation import MAX_SAMPLES
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from relaxd.evaluation.sets import sets_of
from relaxd.media.messages import to_proto
from relaxd.media.prompt_media import NO_MEDIA, PromptMedia
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.reasons import ENV_FAILED
from relaxd.replica.replica_service import ReplicaContext, ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import AGENT, ROLES
from relaxd.rpc.errors import Unavailable, Violations
from relaxd.rpc.message_parts import numbers
from relaxd.seeds import seed_of
from relaxd.text import parse_json
from relaxd.v1 import agent_pb2, agent_pb2_grpc
from relaxd.v1.agent_pb2 import ConverseResponse
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.reward_pb2 import EnvironmentOutcome
from relaxd.v1.sample_pb2 import FinishReason, SamplingParams
from relaxd.waiting import duration
from services.agent.containers import ContainerPrograms
from services.agent.conversation import Conversation, Conversations, EnvironmentConversations
from services.agent.endpoint import Endpoint
from services.agent.engines import RefusedPrompt, RunEngines, WantedWeights
from services.agent.environments import Environments
from services.agent.group_conversations import GroupConversations, example_of, hold_with_retries
from services.agent.model_turns import BadPrompt, PolicyModel
from services.agent.program_conversations import FunctionConversations, ProgramConversations, Programs

SLOW_SECONDS = 2.0
"""Seconds after which a slow call of an environment is named in the replica's status."""


class AgentService(StageReplica):
    """Holds conversations for the groups that the replica works on, and for evaluations."""

    role = AGENT
    stage = ROLES[AGENT].stage

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._run_id = ""
        self._engines: RunEngines | None = None
        self._others: list[Environments | Programs | Endpoint] = []
        """Environments, programs and endpoints to close at the end: first the run's, then those of evaluation sets
        alone."""
        self._conversations: list[Conversations] = []
        """Conversations with the run's environment, program or function, followed by those of evaluation sets."""
        self._groups: GroupConversations | None = None
        self.evaluations: EvaluationConversations | None = None
        """Holds the conversations of evaluations; None in a run without evaluations."""

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._run_id = assignment.run_id
        if not ROLES[AGENT].works_on(self.stage, config):
            self._detail = "this run has no conversations (agent.environment, agent.function, agent.command)"
            return
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, Callable[[], int]]:
        """Start the environments, programs and endpoints, so that a wrong name fails the start, not every group.

        Returns a function that processes a group, and a function that returns the maximum number of groups to hold.
        """
        folder = await asyncio.to_thread(resolve_model, config.model.path)
        tokenizer = await asyncio.to_thread(PromptTokenizer.of_run, config, folder)
        if tokenizer.template is None:
            raise DataError("model.chat_template", "is not set, and the model has none, which conversations need")
        self._engines = engines = RunEngines(self._context, self._run_id)
        model = PolicyModel(config, tokenizer, reply_format(tokenizer.template), engines)

        async def start(agent: AgentConfig, setting: str) -> Conversations:
            told = self._context.user_messages.add
            conversations: Conversations
            others: list[Environments | Programs | Endpoint]
            if agent.command:
                programs = ContainerPrograms(agent) if agent.container else Programs(agent)
                conversations, others = ProgramConversations(model, programs), [programs]
            elif agent.function:
                functions, endpoint = Environments(agent, "agent.function", told), Endpoint()
                conversations, others = FunctionConversations(model, functions, endpoint), [functions, endpoint]
            else:
                environments = Environments(agent, setting, told)
                conversations, others = EnvironmentConversations(model, environments), [environments]
            self._others += others
            for one in others:
                await one.start()
            self._conversations.append(conversations)
            return conversations

        of_run = await start(config.agent, "agent.environment")
        by_set = {
            one.name: of_run
            if one.agent is None or one.agent == config.agent
            else await start(one.agent, f'environment of the evaluation set "{one.name}"')
            for one in sets_of(config)
        }
        places = asyncio.Semaphore(config.agent.max_sessions)
        self._groups = groups = GroupConversations(config, self._begin, engines, of_run, places, self._look_for_room)
        opened = [one.name for one in sets_of(config) if (one.reward or config.reward).media]
        self.evaluations = evaluations = EvaluationConversations(config.agent, by_set, places, opened)

        def room() -> int:
            return groups.room(self._worker.held if self._worker is not None else 0, evaluations.unfinished)

        return groups.process, room

    def _begin(self, delivery: Delivery, oldest: int) -> bool:
        return self._board is not None and self._board.begin(delivery, oldest)

    def _look_for_room(self) -> None:
        if self._worker is not None:
            self._worker.look_for_room()

    async def stop_run(self) -> None:
        groups, engines, others = self._groups, self._engines, self._others
        self._cancel_evaluations()
        self._groups = self._engines = self.evaluations = None
        self._others, self._conversations = [], []
        await super().stop_run()
        if groups is not None:
            groups.cancel()
        if engines is not None:
            await engines.close()
        for one in others:
            await one.close()

    async def drain(self, seconds: float) -> int:
        """Finish the groups in progress, and hand groups that aren't finished in time back to the board.

        Conversations of evaluations are cancelled; other replicas start them again.
        """
        self._cancel_evaluations()
        held = await super().drain(seconds)
        if self._groups is not None:
            self._groups.cancel()
        return held

    def _cancel_evaluations(self) -> None:
        if self.evaluations is not None:
            self.evaluations.cancel()

    def status(self) -> ServiceStatus:
        """Return the replica's status.

        Its detail names the slowest open call of an environment, for which a step may wait.
        """
        status = super().status()
        calls = [(since, session) for one in self._conversations for session, since in one.open_calls.items()]
        since, session = min(calls, default=(0.0, ""))
        if status.detail or not session or (seconds := time.monotonic() - since) < SLOW_SECONDS:
            return status
        return replace(status, detail=f"waiting for the environment of conversation {session}, for {duration(seconds)}")

    def pieces(self) -> int:
        """Return a count of engines' messages and of environments' and programs' calls and checks.

        It grows while the replica makes progress.
        """
        if self._engines is None:
            return 0
        return self._engines.pieces + sum(conversations.calls for conversations in self._conversations)


class EvaluationConversations:
    """Holds the conversations of a run's evaluations."""

    def __init__(
        self,
        agent: AgentConfig,
        by_set: Mapping[str, Conversations],
        places: asyncio.Semaphore,
        opened: Collection[str] = (),
    ) -> None:
        """`by_set`: conversations by evaluation set. `places`: semaphore that limits concurrent conversations.

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
        """Number of evaluations' conversations that haven't ended."""
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
        """Cancel all conversations of evaluations. Their callers may repeat them at other replicas."""
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
    """Return the value of a protobuf field, as a list if the field is repeated."""
    return value if isinstance(value, int | float) else list(value)


class AgentServicer(agent_pb2_grpc.AgentServicer):
    """Serves the calls of relaxd.v1.Agent."""

    def __init__(self, service: AgentService) -> None:
        self._service = service

    async def Converse(
        self, request: agent_pb2.ConverseRequest, context: Any
    ) -> AsyncIterator[agent_pb2.ConverseResponse]:
        """Hold conversations about a prompt, and stream each of them when it has ended."""
        evaluations = self._service.evaluations
        if evaluations is None:
            raise Unavailable("this replica works on no run whose samples are conversations")
        violations = Violations()
        name, known, most = request.evaluation_set, evaluations.sets, request.sampling.max_new_tokens
        violations.check(name in known, "evaluation_set", f"is {name!r}: the run has {', '.join(known) or 'none'}")
        violations.check(1 <= request.n <= MAX_SAMPLES, "n", f"is {request.n}: it must be 1 to {MAX_SAMPLES}")
        violations.check(most >= 1, "sampling.max_new_tokens", f"is {most}: it must be at least 1")
        prompt: Any = None
        try:
            prompt = parse_json(request.prompt_json)
        except ValueError as error:
            violations.add("prompt_json", f"isn't JSON: {error}")
        else:
            has_text = isinstance(prompt, dict) and isinstance(prompt.get("text"), str)
            violations.check(has_text, "prompt_json", 'must be an object with "text", as in the column "prompt"')
        violations.raise_if_any()
        wanted = WantedWeights(request.weights.term, request.weights.version, request.or_later)
        media = PromptMedia.from_proto(request)
        held = evaluations.hold(name, example_of(prompt), request.n, request.sampling, wanted, media)
        async with aclosing(held):  # type: ignore[type-var]
            async for conversation in held:
                yield conversation
