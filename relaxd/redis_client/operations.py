"""Redis operations that are independent of a connection.

A RedisOperation is a generator: it yields requests to Redis, receives the replies, and returns a result. So an
operation is written once for both kinds of connection: a Board executes operations in the calling thread, an AsyncBoard
in the event loop.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")

At = int | str | None
"""Redis server of a request: None for the board's Redis, a number for an entry of board.data_urls, or a data node's
URL."""
Command = tuple[Any, ...]


class Send(NamedTuple):
    """Request to send commands in one round trip. The answer is the list of replies; the first error in it is
    raised."""

    commands: Sequence[Command]
    at: At = None
    how: Literal["read", "atomic", "write"] = "read"
    """Mode of sending the commands. "atomic": as a transaction. "write": the replies come only once Redis's replicas
    have the writes, if the URL has `wait_replicas`."""


class FindKeys(NamedTuple):
    """Request for the keys of a server that begin with a prefix. The answer is a list of texts."""

    prefix: str
    at: At = None


Request = Send | FindKeys
RedisOperation = Generator[Request, Any, T]


def ask(*command: Any, at: At = None) -> RedisOperation[Any]:
    """Send one read-only command to Redis. Returns the command's reply."""
    (reply,) = yield Send((command,), at)
    return reply


def is_cluster_node(at: At = None) -> RedisOperation[bool]:
    """Return True if a server is a node of a Redis Cluster."""
    return bool((yield from ask("INFO", "cluster", at=at)).get("cluster_enabled"))


def execute(operation: RedisOperation[T], send: Callable[[Request], list[Any]]) -> T:
    """Execute a Redis operation in the calling thread, and return the operation's result."""
    try:
        request = next(operation)
        while True:
            try:
                replies = send(request)
            except BaseException as error:
                request = operation.throw(error)
            else:
                request = operation.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


async def execute_async(operation: RedisOperation[T], send: Callable[[Request], Coroutine[Any, Any, list[Any]]]) -> T:
    """Execute a Redis operation in the event loop, and return the operation's result."""
    try:
        request = next(operation)
        while True:
            try:
                replies = await send(request)
            except BaseException as error:  # also that the caller is cancelled
                request = operation.throw(error)
            else:
                request = operation.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


class Blocking(ABC):
    """Base class of clients that execute Redis operations in the calling thread."""

    def _run(self, operation: RedisOperation[T]) -> T:
        return execute(operation, self._send)

    @abstractmethod
    def _send(self, request: Request) -> list[Any]:
        """Send an operation's request to Redis, and return the replies."""


class Asynchronous(ABC):
    """Base class of clients that execute Redis operations in the event loop."""

    async def _run(self, operation: RedisOperation[T]) -> T:
        return await execute_async(operation, self._send)

    @abstractmethod
    async def _send(self, request: Request) -> list[Any]:
        """Send an operation's request to Redis, and return the replies."""


class Operation(Generic[P, T]):
    """Descriptor that makes a Redis operation a method: blocking in a Blocking class, a coroutine in an Asynchronous
    class."""

    def __init__(self, operation: Callable[Concatenate[Any, P], RedisOperation[T]]) -> None:
        self._operation = operation
        functools.update_wrapper(self, operation)  # type: ignore[arg-type]

    @overload
    def __get__(self, board: Blocking, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, board: Asynchronous, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, board: Any, owner: type) -> Any:
        if board is None:  # accessed on the class, for its documentation
            return self._operation
        operation = self._operation

        def call(*arguments: P.args, **named: P.kwargs) -> Any:
            return board._run(operation(board, *arguments, **named))

        return call


def operation(operation: Callable[Concatenate[Any, P], RedisOperation[T]]) -> Operation[P, T]:
    """Make a Redis operation a method of blocking and asyncio boards. Inside other operations, use the operation
    itself, not the method."""
    return Operation(operation)
