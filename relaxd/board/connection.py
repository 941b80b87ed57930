"""Connections to a Redis, blocking and in asyncio: deadlines, cached scripts, retries with back-off, typed errors.

After a failover, relaxd/redis_client/lookups.py finds the new primary for the next connection.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ResponseError
from redis.retry import Retry

from relaxd.board.command_packing import CommandPacker
from relaxd.board.scripts import loading, script_loads, translate
from relaxd.board.types import BoardError, BoardUnavailable
from relaxd.redis_client import (
    acknowledged,
    acknowledged_async,
    connect,
    connect_async,
    keys_of,
    keys_of_async,
    misnamed,
    parse,
    passing,
    read,
    read_async,
    where,
)
from relaxd.redis_client.operations import Asynchronous, At, Blocking, Command, FindKeys, Request
from relaxd.waiting import Backoff

BACKOFF = Backoff(first_seconds=0.02, max_seconds=1.0)


class Retries:
    """Decides whether and when an operation on Redis is tried again after an error."""

    def __init__(self, url: str, seconds: float) -> None:
        """`seconds`: maximum time of all attempts together."""
        self._url = url
        self._deadline = time.monotonic() + seconds
        self._failures = 0

    def pause_after(self, error: redis.RedisError) -> float:
        """Return the seconds to wait after an error before the operation is tried again.

        Raises BoardUnavailable once no time is left, another BoardError if Redis refuses the operation, and any other
        error unchanged.
        """
        if not (why := passing(error)):
            if why := misnamed(error):
                raise BoardError(f"Redis at {where(self._url)} {why}") from error
            if isinstance(error, ResponseError):
                raise translate(error) from error
            raise error
        self._failures += 1
        pause = BACKOFF.pause(self._failures)
        if time.monotonic() + pause > self._deadline:
            raise BoardUnavailable(f"Redis at {where(self._url)} {why}") from error
        return pause


Connection = TypeVar("Connection")


class Servers(Generic[Connection]):
    """Connections to the board's Redis and the data nodes, by the name with which operations ask for a server."""

    def __init__(self, connect: Callable[[str], Connection], board: Connection, urls: Sequence[str]) -> None:
        """`connect`: opens a connection to a URL. `urls`: the data nodes' URLs, board.data_urls."""
        self._connect = connect
        self.board = board
        self.data = tuple(connect(url) for url in urls)
        self._named = dict(zip(urls, self.data, strict=True))

    def at(self, server: At) -> Connection:
        """Return the connection to a server. Raises BoardError if no data node has this number."""
        if server is None:
            return self.board
        if isinstance(server, str):
            if server not in self._named:
                self._named[server] = self._connect(server)
            return self._named[server]
        if server >= len(self.data):
            raise BoardError(f"a payload is on data node {server}, but board.data_urls has {len(self.data)}")
        return self.data[server]

    @property
    def every(self) -> tuple[Connection, ...]:
        """All open connections; the first is to the board's Redis."""
        return (self.board, *self._named.values())


T = TypeVar("T")

RAW_REPLIES = ("XREADGROUP", "XPENDING")
"""Redis commands whose replies are used as they are, although redis-py would convert them to dictionaries."""


class _Connection:
    """Base class of connections to one Redis: their settings, and redis-py's client, blocking or in asyncio."""

    def __init__(
        self,
        connect: Callable[..., Any],
        url: str,
        *,
        tag: str,
        timeout_seconds: float,
        retry_seconds: float,
        **own: Any,
    ) -> None:
        """`tag`: hash tag of the run's keys, which selects a cluster's node. `own`: further arguments of `connect`."""
        self.url = url
        self.retry_seconds = retry_seconds
        self.timeout_seconds = timeout_seconds
        self._replicas = parse(url).wait_replicas
        common: dict[str, Any] = {"protocol": 2, "decode_responses": False, "socket_keepalive": True}
        self.client = connect(url, tag=tag, seconds=timeout_seconds, **common, **own)
        for name in RAW_REPLIES:
            del self.client.response_callbacks[name]

    @property
    def _waits(self) -> dict[str, Any]:
        """Arguments for a write's wait: number of replicas, and how long, which is less than the read's time-out."""
        return {"replicas": self._replicas, "seconds": self.timeout_seconds / 2}


class RedisConnection(_Connection):
    """A thread-safe connection pool that retries operations while Redis is unavailable.

    Operations must be idempotent: one whose reply was lost, or that too few replicas have, runs again.
    `timeout_seconds` limits connecting and each read; `retry_seconds` limits all attempts together, after which
    BoardUnavailable is raised. With `wait_replicas` in the URL, completed writes survive the loss of the primary.
    """

    client: redis.Redis

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(connect, url, retry=Retry(NoBackoff(), 0), command_packer=CommandPacker(), **settings)

    def send(self, request: Request) -> list[Any]:
        """Send the commands of an operation's request to Redis, and return their replies."""
        if isinstance(request, FindKeys):
            return self.run(lambda client: keys_of(client, request.prefix))
        if request.how == "write":
            return self.write(request.commands)
        return self.run(lambda client: read(client, request.commands, atomic=request.how == "atomic"))

    def write(self, commands: Sequence[Command]) -> list[Any]:
        """Send writing commands in one round trip. Returns their replies once Redis's replicas have the writes."""
        return self.run(lambda client: acknowledged(client, commands, **self._waits))

    def run(self, operation: Callable[[redis.Redis], T]) -> T:
        """Call `operation` with redis-py's client; on lost connections and transient errors, retry it with back-off."""
        retries = Retries(self.url, self.retry_seconds)
        while True:
            try:
                return operation(self.client)
            except NoScriptError:
                with loading():
                    read(self.client, script_loads())
            except redis.RedisError as error:
                time.sleep(retries.pause_after(error))  # brief: at most retry_seconds in all

    def close(self) -> None:
        """Close all connections of the pool."""
        self.client.close()


class BlockingFace(Blocking):
    """Executes operations in the calling thread."""

    connect_to = RedisConnection
    _nodes: Servers[RedisConnection]

    def close(self) -> None:
        """Close the connections to Redis."""
        for connection in self._nodes.every:
            connection.close()

    def _send(self, request: Request) -> list[Any]:
        return self._nodes.at(request.at).send(request)


AT_ONCE = 64
"""Maximum number of concurrent operations, each on a separate connection; further operations wait."""


class AsyncRedisConnection(_Connection):
    """Connection pool for one event loop, which otherwise behaves as `RedisConnection`."""

    client: redis.asyncio.Redis

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(connect_async, url, retry=AsyncRetry(NoBackoff(), 0), packer=CommandPacker(), **settings)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def send(self, request: Request) -> list[Any]:
        """Send the commands of an operation's request to Redis, and return their replies."""
        if isinstance(request, FindKeys):
            return await self.run(lambda client: keys_of_async(client, request.prefix))
        if request.how == "write":
            return await self.write(request.commands)
        return await self.run(lambda client: read_async(client, request.commands, atomic=request.how == "atomic"))

    async def write(self, commands: Sequence[Command]) -> list[Any]:
        """Send writing commands in one round trip. Returns their replies once Redis's replicas have the writes."""
        return await self.run(lambda client: acknowledged_async(client, commands, **self._waits))

    async def run(self, operation: Callable[[redis.asyncio.Redis], Awaitable[T]]) -> T:
        """Call `operation` with redis-py's client; on lost connections and transient errors, retry it with back-off."""
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
        """Close all connections of the pool."""
        await self.client.aclose()


class AsynchronousFace(Asynchronous):
    """Executes operations in the event loop."""

    connect_to = AsyncRedisConnection
    _nodes: Servers[AsyncRedisConnection]

    async def close(self) -> None:
        """Close the connections to Redis."""
        for connection in self._nodes.every:
            await connection.close()

    async def _send(self, request: Request) -> list[Any]:
        return await self._nodes.at(request.at).send(request)
