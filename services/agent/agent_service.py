"""The agent service: it works on the stage "rollout" of runs whose samples are conversations with an environment."""

import asyncio
from collections.abc import Callable

from relaxd.board import Delivery
from relaxd.board.worker import Process
from relaxd.config import RunConfig
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.envs.replies import reply_format
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.replica.replica_context import ReplicaContext
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import AGENT, ROLES
from relaxd.v1.coordinator_pb2 import Assignment
from services.agent.conversation import Conversations
from services.agent.engines import RunEngines
from services.agent.environments import Environments
from services.agent.group_conversations import GroupConversations


class AgentService(StageReplica):
    """Holds the conversations of the groups that it takes."""

    role = AGENT
    stage = ROLES[AGENT].stage

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self._run_id = ""
        self._engines: RunEngines | None = None
        self._environments: Environments | None = None
        self._conversations: Conversations | None = None
        self._groups: GroupConversations | None = None

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._run_id = assignment.run_id
        if not ROLES[AGENT].works_on(self.stage, config):
            self._detail = "this run has no environment (agent.environment)"
            return
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, Callable[[], int]]:
        """Start the environment, so that a wrong name fails the start instead of every group."""
        folder = await asyncio.to_thread(resolve_model, config.model.path)
        tokenizer = await asyncio.to_thread(PromptTokenizer.of_run, config, folder)
        if tokenizer.template is None:
            raise DataError("model.chat_template", "is not set, and the model has none, which conversations need")
        self._environments = environments = Environments(config.agent)
        await environments.start()
        self._engines = engines = RunEngines(self._context, self._run_id)
        form = reply_format(tokenizer.template)
        self._conversations = Conversations(config, tokenizer, form, engines, environments)
        self._groups = groups = GroupConversations(config, self._begin, engines, self._conversations)
        return groups.process, lambda: groups.room(self._worker.held if self._worker is not None else 0)

    def _begin(self, delivery: Delivery, oldest: int) -> bool:
        return self._board is not None and self._board.begin(delivery, oldest)

    async def stop_run(self) -> None:
        groups, engines, environments = self._groups, self._engines, self._environments
        self._groups = self._engines = self._environments = self._conversations = None
        await super().stop_run()
        if groups is not None:
            groups.cancel()
        if engines is not None:
            await engines.close()
        if environments is not None:
            await environments.close()

    async def drain(self, seconds: float) -> int:
        """Finish groups. Those not finished in time return to the board, so none is held afterwards."""
        held = await super().drain(seconds)
        if self._groups is not None:
            self._groups.cancel()
        return held

    def pieces(self) -> int:
        """Return the number of messages of engines and of calls of the environment."""
        if self._engines is None or self._conversations is None:
            return 0
        return self._engines.pieces + self._conversations.calls
