"""The same connection in asyncio (see relaxd.board.connections.blocking)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError

from relaxd.board.connections.blocking import RAW_REPLIES
from relaxd.board.connections.resp import CommandPacker
from relaxd.board.connections.retries import Retries
from relaxd.board.connections.scripts import loading, script_loads
from relaxd.board.connections.servers import Servers
from relaxd.redis_client import acknowledged_async, connect_async, keys_of_async, parse, read_async
from relaxd.redis_client.moves import Asynchronous, Command, FindKeys, Request

T = TypeVar("T")

AT_ONCE = 64
"""Maximum number of concurrent operations, one connection each; further ones wait."""


class AsyncRedisConnection:
    """A connection pool for one event loop. See RedisConnection."""

    def __init__(self, url: str, *, tag: str, timeout_seconds: float, retry_seconds: float) -> None:
        """`tag`: the run, whose keys are in one slot of a cluster."""
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self._replicas = parse(url).wait_replicas
        self._turns = asyncio.Semaphore(AT_ONCE)
        self.client: redis.asyncio.Redis = connect_async(
            url,
            tag=tag,
            protocol=2,
            decode_responses=False,
            seconds=timeout_seconds,
            socket_keepalive=True,
            retry=AsyncRetry(NoBackoff(), 0),
            packer=CommandPacker(),
        )
        for name in RAW_REPLIES:
            del self.client.response_callbacks[name]

    async def send(self, request: Request) -> list[Any]:
        """Carry out what a move asks for."""
        if isinstance(request, FindKeys):
            return await self.run(lambda client: keys_of_async(client, request.prefix))
        if request.how == "write":
            return await self.write(request.commands)
        return await self.run(lambda client: read_async(client, request.commands, atomic=request.how == "atomic"))

    async def write(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip and return their replies, once replicas have what they wrote."""
        how: dict[str, Any] = {"replicas": self._replicas, "seconds": self.timeout_seconds / 2}
        return await self.run(lambda client: acknowledged_async(client, commands, **how))

    async def run(self, operation: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        """Run an operation, retrying it with back-off on connection and transient errors (see PASSING)."""
        retries = Retries(self.url, self.retry_seconds)
        while True:
            try:
                async with self._turns:
                    return await operation(self.client)
            except NoScriptError:
                with loading():
                    await read_async(self.client, script_loads())
            except redis.RedisError as error:
                await asyncio.sleep(retries.pause_after(error))  # brief: at most retry_seconds in all

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()


class AsynchronousFace(Asynchronous):
    """Carries moves out in the event loop."""

    connect_to = AsyncRedisConnection
    _nodes: Servers[AsyncRedisConnection]

    async def close(self) -> None:
        """Close the connections to Redis."""
        for connection in self._nodes.every:
            await connection.close()

    async def _send(self, request: Request) -> list[Any]:
        return await self._nodes.at(request.at).send(request)
