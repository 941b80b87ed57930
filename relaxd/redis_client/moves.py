"""Moves: operations on what Redis holds, without a connection.

A move is a generator. It yields what is to be sent to Redis, is given the replies, and returns the operation's result.
So each operation is written once: its commands, what follows from their replies, and how these are read. Whoever has
a connection only carries moves out: a Board in the calling thread, an AsyncBoard in the event loop.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, Generic, Literal, NamedTuple, ParamSpec, TypeVar, overload

P = ParamSpec("P")
T = TypeVar("T")

At = int | str | None
"""A server: None is the board's Redis, a number one of board.data_urls, a text the URL of a data node."""
Command = tuple[Any, ...]


class Send(NamedTuple):
    """Commands for one round trip. The replies are a list; the first error among them is raised."""

    commands: Sequence[Command]
    at: At = None
    how: Literal["read", "atomic", "write"] = "read"
    """`write`: the replies come once replicas have what was written, if the URL has `wait_replicas`."""


class FindKeys(NamedTuple):
    """Ask for the keys of a server that begin with a prefix, as a list of texts."""

    prefix: str
    at: At = None


Request = Send | FindKeys
Move = Generator[Request, Any, T]


def ask(*command: Any, at: At = None) -> Move[Any]:
    """Send one command that changes nothing. Returns its reply."""
    (reply,) = yield Send((command,), at)
    return reply


def is_cluster_node(at: At = None) -> Move[bool]:
    """Return whether a server is a node of a Redis Cluster."""
    return bool((yield from ask("INFO", "cluster", at=at)).get("cluster_enabled"))


def carry_out(move: Move[T], send: Callable[[Request], list[Any]]) -> T:
    """Carry a move out, and return its result."""
    try:
        request = next(move)
        while True:
            try:
                replies = send(request)
            except BaseException as error:
                request = move.throw(error)
            else:
                request = move.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


async def carry_out_async(move: Move[T], send: Callable[[Request], Coroutine[Any, Any, list[Any]]]) -> T:
    """Carry a move out in the event loop, and return its result."""
    try:
        request = next(move)
        while True:
            try:
                replies = await send(request)
            except BaseException as error:  # also that the caller is cancelled
                request = move.throw(error)
            else:
                request = move.send(replies)
    except StopIteration as end:
        result: T = end.value
        return result


class Blocking(ABC):
    """A face that carries moves out in the calling thread."""

    def _run(self, move: Move[T]) -> T:
        return carry_out(move, self._send)

    @abstractmethod
    def _send(self, request: Request) -> list[Any]:
        """Send a request, and return the replies."""


class Asynchronous(ABC):
    """A face that carries moves out in the event loop."""

    async def _run(self, move: Move[T]) -> T:
        return await carry_out_async(move, self._send)

    @abstractmethod
    async def _send(self, request: Request) -> list[Any]:
        """Send a request, and return the replies."""


class Operation(Generic[P, T]):
    """A move as a method of both faces: of one that is Blocking it returns the result, of the other it is awaited."""

    def __init__(self, move: Callable[Concatenate[Any, P], Move[T]]) -> None:
        self._move = move
        functools.update_wrapper(self, move)  # type: ignore[arg-type]

    @overload
    def __get__(self, board: Blocking, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, board: Asynchronous, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, board: Any, owner: type) -> Any:
        if board is None:  # asked of the class, by whoever reads its documentation
            return self._move
        move = self._move

        def call(*arguments: P.args, **named: P.kwargs) -> Any:
            return board._run(move(board, *arguments, **named))

        return call


def operation(move: Callable[Concatenate[Any, P], Move[T]]) -> Operation[P, T]:
    """Make a move an operation of both faces. Other moves use what it is made of, not the operation."""
    return Operation(move)
