"""The agent service: works on the stage "rollout" of runs whose samples are conversations with an environment."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from relaxd.board import Delivery
from relaxd.board.worker import Process
from relaxd.config import AgentConfig, RunConfig
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from relaxd.evaluation.sets import sets_of
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.replica.replica_service import ReplicaContext, ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import AGENT, ROLES
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.waiting import duration
from services.agent.containers import ContainerPrograms
from services.agent.conversation import Conversations, EnvironmentConversations
from services.agent.endpoint import Endpoint
from services.agent.engines import RunEngines
from services.agent.environments import Environments
from services.agent.evaluation_conversations import EvaluationConversations
from services.agent.group_conversations import GroupConversations
from services.agent.model_turns import PolicyModel
from services.agent.program_conversations import FunctionConversations, ProgramConversations
from services.agent.programs import Programs

SLOW_SECONDS = 2.0
"""Seconds after which the status names a slow call of an environment."""


class AgentService(StageReplica):
    """Holds the conversations of the replica's groups, and of evaluations."""

    role = AGENT
    stage = ROLES[AGENT].stage

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._run_id = ""
        self._engines: RunEngines | None = None
        self._others: list[Environments | Programs | Endpoint] = []
        """Environments, programs and endpoints to close: the run's, then those that only evaluation sets use."""
        self._conversations: list[Conversations] = []
        """Conversations with the run's environment, program or function, then with those of evaluation sets."""
        self._groups: GroupConversations | None = None
        self.evaluations: EvaluationConversations | None = None
        """Conversations of evaluations; None in runs without any."""

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._run_id = assignment.run_id
        if not ROLES[AGENT].works_on(self.stage, config):
            self._detail = "this run has no conversations (agent.environment, agent.function, agent.command)"
            return
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, Callable[[], int]]:
        """Start the environments, programs and endpoints, so that a wrong name fails the start, not every group.

        Returns a function that processes groups, and one that returns the number of groups to hold.
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
        """Finish groups, and hand those that are not finished in time back to the board.

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
        """Return the state; the detail names the slowest open call of an environment, for which a step may wait."""
        status = super().status()
        calls = [(since, session) for one in self._conversations for session, since in one.open_calls.items()]
        since, session = min(calls, default=(0.0, ""))
        if status.detail or not session or (seconds := time.monotonic() - since) < SLOW_SECONDS:
            return status
        return replace(status, detail=f"waiting for the environment of conversation {session}, for {duration(seconds)}")

    def pieces(self) -> int:
        """Return the number of engines' messages and of calls and checks of environments and programs; shows
        progress."""
        if self._engines is None:
            return 0
        return self._engines.pieces + sum(conversations.calls for conversations in self._conversations)
