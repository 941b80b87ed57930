"""Redis operations that are independent of a connection.

A RedisOperation is a generator: it yields requests to Redis, receives the replies, and returns a result. So the
commands of an operation and the use of their replies are written once, for both kinds of connection: a Board executes
operations in the calling thread, an AsyncBoard in the event loop.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")

At = int | str | None
"""A server: None for the board's Redis, a number for one of board.data_urls, a text for a data node's URL."""
Command = tuple[Any, ...]


class Send(NamedTuple):
    """Commands for one round trip. The replies are a list; the first error in them is raised."""

    commands: Sequence[Command]
    at: At = None
    how: Literal["read", "atomic", "write"] = "read"
    """`write`: the replies come once replicas have the writes, if the URL has `wait_replicas`."""


class FindKeys(NamedTuple):
    """Ask for the keys of a server that begin with a prefix, as a list of texts."""

    prefix: str
    at: At = None


Request = Send | FindKeys
RedisOperation = Generator[Request, Any, T]


def ask(*command: Any, at: At = None) -> RedisOperation[Any]:
    """Send one read-only command. Returns its reply."""
    (reply,) = yield Send((command,), at)
    return reply


def is_cluster_node(at: At = None) -> RedisOperation[bool]:
    """Return whether a server is a node of a Redis Cluster."""
    return bool((yield from ask("INFO", "cluster", at=at)).get("cluster_enabled"))


def execute(operation: RedisOperation[T], send: Callable[[Request], list[Any]]) -> T:
    """Execute an operation, and return its result."""
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
    """Execute an operation in the event loop, and return its result."""
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
    """Base of clients that execute operations in the calling thread."""

    def _run(self, operation: RedisOperation[T]) -> T:
        return execute(operation, self._send)

    @abstractmethod
    def _send(self, request: Request) -> list[Any]:
        """Send a request, and return the replies."""


class Asynchronous(ABC):
    """Base of clients that execute operations in the event loop."""

    async def _run(self, operation: RedisOperation[T]) -> T:
        return await execute_async(operation, self._send)

    @abstractmethod
    async def _send(self, request: Request) -> list[Any]:
        """Send a request, and return the replies."""


class Operation(Generic[P, T]):
    """Turns an operation into a method, which a Blocking class calls and an Asynchronous class awaits."""

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
    """Make an operation a method of blocking and asyncio boards. Other operations use the operation, not the method."""
    return Operation(operation)
