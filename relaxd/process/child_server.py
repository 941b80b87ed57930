"""The child's side of `relaxd.process.child`: a gRPC server on a separate thread, which ends with the parent."""

import asyncio
import contextvars
import ctypes
import inspect
import logging
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import grpc

from relaxd.process.child import LIFELINE_VARIABLE, SOCKET_VARIABLE, TOKEN_VARIABLE
from relaxd.process.gpu_lease import end_with_lease
from relaxd.process.upkeep import IdleThreads
from relaxd.rpc.access import AccessTokens
from relaxd.rpc.interceptor import CallInterceptor

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

T = TypeVar("T")
Handler = TypeVar("Handler", bound=Callable[..., Any])

logger = logging.getLogger(__name__)


class ChildServer:
    """gRPC server of a child process, which answers the parent's calls.

    Handlers that are plain functions run in separate threads, so none waits for another; coroutines and asynchronous
    generators run in the server's event loop and must not block. Handlers fail by raising RpcError. For handlers that
    answer a stream see `in_turn`.
    """

    def __init__(self, *services: tuple[Callable[[Any, Any], None], Any]) -> None:
        """Create a server of `services`: pairs of a generated function add_<Name>Servicer_to_server and its
        servicer."""
        if LIFELINE_VARIABLE not in os.environ:
            raise RuntimeError(f"{LIFELINE_VARIABLE} is not set: this program is started by its service, not by hand")
        self._lifeline = socket.socket(fileno=int(os.environ.pop(LIFELINE_VARIABLE)))
        self._lifeline.set_inheritable(False)
        self._path, self._token = os.environ.pop(SOCKET_VARIABLE), os.environ.pop(TOKEN_VARIABLE)
        die_with_parent()
        end_with_lease()
        self._services = services

    def serve(self) -> None:
        """Answer the parent's calls until the parent has ended. Then end this process, even if its other threads
        hang."""
        threading.Thread(target=self._serve, name="gRPC", daemon=True).start()
        with suppress(OSError):
            self._lifeline.recv(1)
        os._exit(0)

    def _serve(self) -> None:
        try:
            asyncio.run(serve_socket(self._path, self._token, self._services, lambda: self._lifeline.send(b"\0")))
        except BaseException:
            logger.exception("the server of the parent's calls failed")
        os._exit(1)


async def serve_socket(
    path: str, token: str, services: tuple[tuple[Callable[[Any, Any], None], Any], ...], on_listening: Callable[[], Any]
) -> None:
    """Serve gRPC `services` (see ChildServer) on a Unix socket, for callers that have `token`, until cancelled."""
    interceptor = CallInterceptor(
        tokens=AccessTokens(token=token), fence=None, deadline_seconds=None, stream_deadline_seconds=None
    )
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(interceptors=[interceptor], options=unlimited)
    threads = IdleThreads()
    for add, servicer in services:
        add(_Threaded(servicer, threads), server)
    server.add_insecure_port(f"unix:{path}")
    try:
        await server.start()
        on_listening()
        await server.wait_for_termination()
    finally:
        await server.stop(None)


class Outbox(Generic[T]):
    """Queue to which any thread adds messages, for a stream that the parent reads."""

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None

    def put(self, message: T) -> None:
        """Add a message to the stream."""
        with self._lock:
            self._messages.append(message)
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Yield the queue's messages in order, as they come. Only one reader at a time."""
        loop = asyncio.get_running_loop()
        while True:
            come = asyncio.Event()
            with self._lock:
                messages = list(self._messages)
                self._messages.clear()
                if not messages:
                    self._wake = partial(loop.call_soon_threadsafe, come.set)
            for message in messages:
                yield message
            if not messages:
                await come.wait()  # idle: there is nothing to send


def in_turn(handler: Handler) -> Handler:
    """Mark a handler, a plain function, as one that answers the requests of a stream one by one, in order
    (`RequestStream` in child_channel.py)."""
    handler.in_turn = True  # type: ignore[attr-defined]
    return handler


@dataclass(frozen=True)
class AndThen:
    """Answer of an `in_turn` handler, with a callback that runs after the answer was sent or the caller has left."""

    answer: Any
    then: Callable[[], None]


class _Threaded:
    """Wraps a servicer: its plain functions become coroutines or asynchronous generators that run them in threads."""

    def __init__(self, servicer: Any, threads: IdleThreads) -> None:
        self._servicer = servicer
        self._threads = threads

    def __getattr__(self, name: str) -> Any:
        handler = getattr(self._servicer, name)
        if inspect.iscoroutinefunction(handler) or inspect.isasyncgenfunction(handler):
            return handler

        def run(request: Any, context: Any) -> "Future[Any]":
            carried = contextvars.copy_context()
            return self._threads.run(name, partial(carried.run, handler, request, context))

        async def call(request: Any, context: Any) -> Any:
            return await asyncio.wrap_future(run(request, context))

        async def call_in_turn(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            async for request in requests:
                answering = run(request, context)
                try:
                    answer = await asyncio.wrap_future(answering)
                    yield answer.answer if isinstance(answer, AndThen) else answer
                finally:  # also if the caller leaves meanwhile
                    answering.add_done_callback(partial(self._follow, name))

        return call_in_turn if getattr(handler, "in_turn", False) else call

    def _follow(self, name: str, answered: "Future[Any]") -> None:
        """Run the callback of a handler's answer in a thread, if the answer has one."""
        if answered.exception() is None and isinstance(answered.result(0), AndThen):
            self._threads.run(name, partial(_do, answered.result(0).then, name))


def _do(then: Callable[[], None], name: str) -> None:
    try:
        then()
    except Exception:
        logger.exception("what follows an answer to %s failed", name)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent ends, even while no Python code can run here.

    If the parent has already ended, this has no effect; then the closed lifeline shows that.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except AttributeError:
        logger.debug("no prctl on this system: only the closed lifeline reports the parent's end")
