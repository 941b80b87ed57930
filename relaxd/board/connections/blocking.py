"""The blocking connection to a Redis: deadlines, cached scripts, retries with back-off, typed errors."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError
from redis.retry import Retry

from relaxd.board.connections.resp import CommandPacker
from relaxd.board.connections.retries import Retries
from relaxd.board.connections.scripts import loading, script_loads
from relaxd.board.connections.servers import Servers
from relaxd.redis_client import acknowledged, connect, keys_of, parse, read
from relaxd.redis_client.moves import Blocking, Command, FindKeys, Request

T = TypeVar("T")

RAW_REPLIES = ("XREADGROUP", "XPENDING")
"""Commands whose replies redis-py would make dictionaries of."""


class RedisConnection:
    """A thread-safe connection pool that retries operations while Redis is unavailable.

    Operations must be idempotent: one whose reply was lost, or that too few replicas have, runs again.
    `timeout_seconds` limits connecting and each read; `retry_seconds` limits all attempts together, after which
    BoardUnavailable is raised. What `write` did survives the primary, if the URL has `wait_replicas`.
    """

    def __init__(self, url: str, *, tag: str, timeout_seconds: float, retry_seconds: float) -> None:
        """`tag`: the run, whose keys are in one slot of a cluster."""
        self.url = url
        self.timeout_seconds = timeout_seconds
        self.retry_seconds = retry_seconds
        self._replicas = parse(url).wait_replicas
        self.client: redis.Redis = connect(
            url,
            tag=tag,
            protocol=2,
            decode_responses=False,
            seconds=timeout_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            command_packer=CommandPacker(),
        )
        for name in RAW_REPLIES:
            del self.client.response_callbacks[name]

    def send(self, request: Request) -> list[Any]:
        """Carry out what a move asks for."""
        if isinstance(request, FindKeys):
            return self.run(lambda client: keys_of(client, request.prefix))
        if request.how == "write":
            return self.write(request.commands)
        return self.run(lambda client: read(client, request.commands, atomic=request.how == "atomic"))

    def write(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands in one round trip and return their replies, once replicas have what they wrote."""
        seconds = self.timeout_seconds / 2  # so that its reply comes before a read gives up
        return self.run(lambda client: acknowledged(client, commands, replicas=self._replicas, seconds=seconds))

    def run(self, operation: Callable[[redis.Redis], T]) -> T:
        """Run an operation, retrying it with back-off on connection and transient errors (see PASSING)."""
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
        """Close all connections."""
        self.client.close()


class BlockingFace(Blocking):
    """Carries moves out in the calling thread."""

    connect_to = RedisConnection
    _nodes: Servers[RedisConnection]

    def close(self) -> None:
        """Close the connections to Redis."""
        for connection in self._nodes.every:
            connection.close()

    def _send(self, request: Request) -> list[Any]:
        return self._nodes.at(request.at).send(request)
