"""Conversations led by a user's function in its host process, as samples of a group."""

import asyncio
import time

from relaxd.envs.client import EnvironmentFailed, ModelAccess, SessionStep
from relaxd.envs.environment import Reply
from services.agent.chat_session import ChatSession
from services.agent.conversation import MAX_INFO, Conversation, Conversations, ConversationStart
from services.agent.endpoint import Endpoint
from services.agent.engines import OutOfTime
from services.agent.environments import Environments
from services.agent.model_turns import PolicyModel
from services.agent.program_conversations import LOOK_SECONDS


class FunctionConversations(Conversations):
    """Holds conversations led by a function, which sends requests to the endpoint like a program."""

    def __init__(self, model: PolicyModel, functions: Environments, endpoint: Endpoint) -> None:
        super().__init__(model)
        self._functions = functions
        self._endpoint = endpoint

    def _end(self, name: str) -> None:
        self._functions.close_session(name)

    async def _converse(self, result: Conversation, start: ConversationStart) -> None:
        session, name = ChatSession(self._model, start, result), start.engine.name
        access = ModelAccess(f"{self._endpoint.open(session)}/v1", session.key)
        begun = time.monotonic()
        try:
            await self._functions.open(name, start.sample, access)
            step = await self._led(name, session, start)
            if not result.turns:
                raise EnvironmentFailed("the function ended, but never asked the model")
            result.reward, result.info = step.reward, dict(list(step.info.items())[:MAX_INFO])
        except EnvironmentFailed:
            if not session.limit:  # a function that a limit of the run stopped may end as it likes
                raise
        finally:
            self._endpoint.close_session(session)
            result.environment_seconds = time.monotonic() - begun - start.engine.asked_seconds
        result.finish = session.limit or session.cut_by or "env_done"

    async def _led(self, name: str, session: ChatSession, start: ConversationStart) -> SessionStep:
        """Return the function's result. Raises OutOfTime, or the error that ended the conversation."""
        running = asyncio.create_task(self._functions.step(name, 1, Reply("")), name="run a function")
        try:
            while True:
                self.calls += 1
                # brief: the next look at the time that is left
                await asyncio.wait((running, session.failed), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if session.failed.done():
                    await session.failed
                if running.done():
                    return await running
                if not session.generating and start.seconds() <= 0:  # a request that runs has the limit itself
                    raise OutOfTime
        finally:
            running.cancel()
