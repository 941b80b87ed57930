"""Client of an environment: a class or function in a child process (its host), or a service at an address."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import grpc

from relaxd.alerts.user_messages import Told, ignore
from relaxd.config import AgentConfig
from relaxd.config.agent import SERVICE
from relaxd.envs.client import (
    EnvironmentClient,
    EnvironmentFailed,
    EnvironmentLate,
    ModelAccess,
    OpenedSession,
    SessionStep,
    start_host,
)
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample
from relaxd.process.child import Child
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.errors import InvalidArgument
from relaxd.waiting import waiting

Answer = TypeVar("Answer")

PROBE_SECONDS = 10.0
"""Maximum seconds for a host to answer a call that runs no user code; after that the host counts as hanging."""
FUNCTION_SECONDS = 7 * 86400.0
"""Deadline of a call of a user's function, in seconds.

It is longer than any conversation, whose own limit ends the call.
"""

_log = logging.getLogger(__name__)


class Environments:
    """Client of an environment or function. Restarts a host that has exited or hangs. Use it in one event loop."""

    def __init__(self, config: AgentConfig, setting: str = "agent.environment", told: Told = ignore) -> None:
        """Create an unconnected client.

        `setting` names the environment in errors; `told` receives the environment's messages to users.
        """
        self._config = config
        self._setting = setting
        self._told = told
        self._child: Child | None = None
        self._client: EnvironmentClient | None = None
        self._starting = asyncio.Lock()
        self._closing: set[asyncio.Task[None]] = set()
        """Background tasks, which close sessions or probe the host."""
        self._probe: asyncio.Task[None] | None = None
        """Task that probes a host whose answer is late, and kills it if it hangs."""
        self._service: grpc.aio.Channel | None = None

    async def start(self) -> None:
        """Start the environment's host, or connect to its service.

        Raises InvalidArgument if the environment's class doesn't exist or refuses the settings.
        """
        if self._config.is_service:
            # A plain channel: a user's service gets none of relaxd's tokens.
            limit = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]  # observations may have media
            self._service = grpc.aio.insecure_channel(self._config.environment.removeprefix(SERVICE), limit)
            self._client = self._client_of(self._service)
        else:
            await self._present_client()

    async def open(self, session_id: str, sample: Sample, access: ModelAccess | None = None) -> OpenedSession:
        """Begin a conversation's session. A function gets the model's address as `access`.

        Raises EnvironmentFailed, and the errors of `start` if the host must be restarted.
        """
        if self._probe is not None:
            with waiting("the environment's host, which is late"):
                await asyncio.wait({self._probe}, timeout=3 * PROBE_SECONDS)
        client = await self._present_client()
        return await self._watched(client.open(session_id, sample, access))

    async def step(self, session_id: str, turn: int, reply: Reply) -> SessionStep:
        """Return the environment's answer to a message of the model. Raises EnvironmentFailed."""
        if self._client is None:
            raise EnvironmentFailed("step: the environment has been closed")
        return await self._watched(self._client.step(session_id, turn, reply))

    def close_session(self, session_id: str) -> None:
        """End a conversation's session in the background."""
        self._begin(self._close_session(session_id), "close a session")

    async def close(self) -> None:
        """Stop the environment's host, or close the connection to its service."""
        for task in list(self._closing):
            task.cancel()
        child, self._child, self._client = self._child, None, None
        if child is not None:
            await child.stop(grace_seconds=0.5)
        if self._service is not None:
            await self._service.close(None)

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _watched(self, call: Awaitable[Answer]) -> Answer:
        """Await a call and return its answer.

        If the answer is late, start a probe that kills the environment's host if the whole host hangs.
        """
        try:
            return await call
        except EnvironmentLate:
            if self._child is not None and self._probe is None:
                self._probe = self._begin(self._end_if_it_hangs(self._child), "probe the environment's host")
            raise

    async def _end_if_it_hangs(self, child: Child) -> None:
        """Kill the environment's host if it doesn't even answer a call that runs no user code."""
        try:
            await EnvironmentClient(child.channel, PROBE_SECONDS, PROBE_SECONDS).close_session("")
        except EnvironmentLate:
            _log.error("killing the environment's host, which answers nothing any more")
            child.kill()
            await asyncio.wait({child.exited}, timeout=PROBE_SECONDS)
        except EnvironmentFailed:
            pass  # it has ended
        finally:
            self._probe = None

    async def _close_session(self, session_id: str) -> None:
        try:
            if self._client is not None:
                await self._client.close_session(session_id)
        except EnvironmentFailed as error:
            _log.warning("session %s: %s", session_id, error)

    async def _present_client(self) -> EnvironmentClient:
        """Return the environment's client, starting its host if necessary. Raises InvalidArgument, ChildError."""
        async with self._starting:
            if self._client is not None and (self._child is None or self._child.alive):
                return self._client
            config = self._config
            try:
                name, is_function = config.function or config.environment, bool(config.function)
                self._child = await start_host(
                    *(name, config.settings, config.python), is_function=is_function, memory_bytes=config.memory_bytes
                )
            except BadEnvironmentError as error:
                raise InvalidArgument(f"{self._setting}: {error}") from error
            self._client = self._client_of(self._child.channel)
            return self._client

    def _client_of(self, to: grpc.aio.Channel) -> EnvironmentClient:
        # A function's call lasts as long as its conversation, whose limit doesn't count waits for engines.
        call = FUNCTION_SECONDS if self._config.function else self._config.call_seconds
        return EnvironmentClient(to, call, self._config.conversation_seconds + 2 * call, self._told)
