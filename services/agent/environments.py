"""An environment of the run: a class that a child process hosts, or a service at an address."""

import asyncio
import logging

import grpc

from relaxd.config import AgentConfig
from relaxd.config.agent import SERVICE
from relaxd.envs.client import EnvironmentClient, EnvironmentFailed, OpenedSession, SessionStep, start_host
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample
from relaxd.process.child import Child
from relaxd.rpc.errors import InvalidArgument

_log = logging.getLogger(__name__)


class Environments:
    """Calls an environment. A host that has exited is started again. Lives in one event loop."""

    def __init__(self, config: AgentConfig, setting: str = "agent.environment") -> None:
        """`setting` is what errors call the environment."""
        self._config = config
        self._setting = setting
        self._child: Child | None = None
        self._client: EnvironmentClient | None = None
        self._starting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        self._service: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Start the environment's host. Raises InvalidArgument: there is no such class, or it refuses the settings."""
        if self._config.is_service:
            # A plain channel: a user's service gets none of relaxd's tokens.
            self._service = grpc.aio.insecure_channel(self._config.environment.removeprefix(SERVICE))
            self._client = self._client_of(self._service)
        else:
            await self._present_client()

    async def open(self, session_id: str, sample: Sample) -> OpenedSession:
        """Begin a conversation. Raises EnvironmentFailed, and what a new host's start raises."""
        return await (await self._present_client()).open(session_id, sample)

    async def step(self, session_id: str, turn: int, reply: Reply) -> SessionStep:
        """Answer a message of the model. Raises EnvironmentFailed."""
        if self._client is None:
            raise EnvironmentFailed("step: the environment has been closed")
        return await self._client.step(session_id, turn, reply)

    def close_session(self, session_id: str) -> None:
        """End a conversation; nobody waits for it."""
        task = asyncio.create_task(self._close_session(session_id), name="close a session")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End the host, or the connection."""
        for task in list(self._closing):
            task.cancel()
        child, self._child, self._client = self._child, None, None
        if child is not None:
            await child.stop(grace_seconds=0.5)
        if self._service is not None:
            await self._service.close(None)

    async def _close_session(self, session_id: str) -> None:
        try:
            if self._client is not None:
                await self._client.close_session(session_id)
        except EnvironmentFailed as error:
            _log.warning("session %s: %s", session_id, error)

    async def _present_client(self) -> EnvironmentClient:
        """Return the client; of a host that isn't there, start it. Raises InvalidArgument, ChildError."""
        async with self._starting:
            if self._client is not None and (self._child is None or self._child.alive):
                return self._client
            config = self._config
            try:
                self._child = await start_host(config.environment, config.settings, config.python)
            except BadEnvironmentError as error:
                raise InvalidArgument(f"{self._setting}: {error}") from error
            self._client = self._client_of(self._child.channel)
            return self._client

    def _client_of(self, to: grpc.aio.Channel) -> EnvironmentClient:
        lease = self._config.conversation_seconds + 2 * self._config.call_seconds
        return EnvironmentClient(to, self._config.call_seconds, lease)
