"""`python -m relaxd.envs.host NAME SETTINGS [KIND [MEMORY_BYTES]]`: serves an environment or a function to a parent.

Each session, a conversation, has its own instance of a user's class. Plain methods run in threads and async ones in a
separate event loop, so that a method that hangs blocks neither other sessions nor the server.
"""

import asyncio
import inspect
import json
import logging
import os
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from relaxd.alerts.user_messages import take_messages
from relaxd.envs.environment import BadEnvironmentError, Reply, Sample, ToolCall, check_step, check_tools, messages_of
from relaxd.envs.loading import load_environment
from relaxd.envs.own_function import MAX_STUCK, FunctionConversation, load_function
from relaxd.importing import describe_error
from relaxd.process.child_server import ChildServer
from relaxd.process.upkeep import IdleThreads
from relaxd.rpc.errors import (
    Aborted,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RpcError,
)
from relaxd.sandbox.enclosure import lower_limit
from relaxd.text import parse_json
from relaxd.v1 import environment_pb2 as pb
from relaxd.v1 import environment_pb2_grpc

Answer = TypeVar("Answer")

_HERE = os.path.dirname(__file__) + os.sep
_log = logging.getLogger(__name__)


class UserCalls:
    """Calls methods of users' classes with a time limit."""

    def __init__(self, memory_bytes: int = 0) -> None:
        """Start a thread for async methods. With a memory limit, a method that runs out of memory ends this process and
        its sessions."""
        # Encoded now: later there may be no memory for it.
        reason = f"agent.memory_bytes = {memory_bytes} is used up: raise it, or free what conversations leave behind\n"
        self._last_words = reason.encode() if memory_bytes else b""
        self._threads = IdleThreads()
        self._loop = asyncio.new_event_loop()
        self._stuck = 0
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="async methods", daemon=True)
        self._loop_thread.start()

    async def call(self, what: str, method: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """Call a user's method, and await its result if it is awaitable.

        Args:
            what: the method's name in errors, such as "step()".
            method: a function from the user's code.
            arguments: arguments for the method.
            seconds: time limit of the call.

        Raises Aborted if the method raised, DeadlineExceeded after `seconds`. After that, a method that isn't async
        still runs: see MAX_STUCK.
        """
        in_thread: list[int] = []
        future: Future[Any] = Future()
        try:
            async with asyncio.timeout(seconds):
                if not inspect.iscoroutinefunction(method):
                    future = self._threads.run(what, partial(_called, in_thread, method, arguments))
                    result = await asyncio.wrap_future(future)
                    if not inspect.isawaitable(result):
                        return result
                else:
                    result = method(*arguments)
                in_thread.append(self._loop_thread.ident or 0)
                future = asyncio.run_coroutine_threadsafe(_awaited(result), self._loop)
                return await asyncio.wrap_future(future)
        except Aborted as error:
            if self._last_words and isinstance(error.__cause__, MemoryError):
                os.write(sys.stderr.fileno(), self._last_words)
                os._exit(1)
            raise
        except TimeoutError:
            place = _place(in_thread[-1]) if in_thread else ""
            if not future.done():  # a thread can't be cancelled
                self._count_stuck(1)
                future.add_done_callback(lambda _: self._count_stuck(-1))
            raise DeadlineExceeded(f"{what} took longer than {seconds:g} s{place}") from None

    def _count_stuck(self, more: int) -> None:
        self._stuck += more
        if self._stuck > MAX_STUCK:
            _log.error("%d calls took too long and still run: this process ends, with its sessions", self._stuck)
            os._exit(1)


def _called(in_thread: list[int], method: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    in_thread.append(threading.get_ident())
    try:
        return method(*arguments)
    except BaseException as error:  # users' code may raise anything, SystemExit as well
        raise _failure(error) from error


async def _awaited(result: Awaitable[Any]) -> Any:
    try:
        return await result
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # users' code may raise anything, SystemExit as well
        raise _failure(error) from error


def _failure(error: BaseException) -> Aborted:
    return Aborted(str(error) if isinstance(error, BadEnvironmentError) else describe_error(error))


def _place(thread: int) -> str:
    """Return where in the user's code a thread is, as " (at env.py:12, in step)"; "" if unknown."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    ours = [index for index, one in enumerate(frames) if one.filename.startswith(_HERE)]
    below = frames[ours[-1] + 1 :] if ours else []
    own = [one for one in below if one.filename == below[0].filename]
    return f" (at {os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else ""


class Session:
    """A conversation of the host. The answer to each turn is computed once, in order, even if the client repeats a
    request."""

    def __init__(self, lease_seconds: float, call_seconds: float, on_over: Callable[[], Any]) -> None:
        """Start the session's lease. `on_over` is called when the lease expires."""
        self.environment: Any = None
        self.call_seconds = call_seconds
        self._lease_seconds = lease_seconds
        self._on_over = on_over
        self._turn = 0
        self._answer: asyncio.Task[Any] | None = None
        self._failed = ""
        self._called_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._watch_lease()

    async def answer(self, turn: int, make: Callable[[], Awaitable[Answer]]) -> Answer:
        """Return the answer to a turn. It is computed by `make`, unless that was done before.

        Turn 0 opens the session. Raises FailedPrecondition if `turn` is neither the last turn nor the next, or an
        earlier turn failed.
        """
        self._called_at = time.monotonic()
        if self._answer is None or turn != self._turn:
            if self._answer is not None and turn != self._turn + 1:
                raise FailedPrecondition(f"turn is {turn}, but the session's last turn is {self._turn}")
            if self._answer is not None and not self._answer.done():
                raise FailedPrecondition(f"turn is {turn}, but turn {self._turn} is not answered yet")
            if self._failed:
                raise FailedPrecondition(f"turn is {turn}, but the session has failed: {self._failed}")
            self._turn, self._answer = turn, asyncio.create_task(self._made(make))
        return await asyncio.shield(self._answer)  # a caller that stops waiting doesn't cancel it

    async def finish(self) -> None:
        """Stop the session's lease, and wait for the answer in progress, at most twice `call_seconds`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._answer is not None:
            await asyncio.wait({self._answer}, timeout=2 * self.call_seconds)  # an opening makes two calls

    async def _made(self, make: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return await make()
        except RpcError as error:
            self._failed = error.message
            raise
        finally:
            self._called_at = time.monotonic()

    def _watch_lease(self) -> None:
        left = self._called_at + self._lease_seconds - time.monotonic()
        is_called = self._answer is not None and not self._answer.done()
        if left <= 0 and not is_called:
            self._on_over()
            return
        delay = max(left, 0.01) if not is_called else max(left, self.call_seconds, 1.0)
        self._timer = asyncio.get_running_loop().call_later(delay, self._watch_lease)


REFUSED = 2
"""Exit code of a host process whose environment can't be used."""
MAX_SESSIONS = 10_000
"""Maximum number of concurrent sessions of a host."""
Returned = TypeVar("Returned")


class EnvironmentHandlers(environment_pb2_grpc.EnvironmentServicer):
    """Handlers of relaxd.v1.Environment for one environment or function. For use in one event loop."""

    def __init__(self, make: Callable[[], Any], memory_bytes: int = 0) -> None:
        """Create handlers without sessions. `make` creates an instance for each conversation.
        `memory_bytes` is this process's memory limit; 0: none."""
        self._make = make
        self._calls = UserCalls(memory_bytes)
        self._sessions: dict[str, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        name, seconds = request.session_id, request.call_seconds
        if not name:
            raise InvalidArgument("session_id is empty", [("session_id", "name the conversation")])
        if not (request.lease_seconds > 0 and seconds > 0):
            raise InvalidArgument(
                f"lease_seconds is {request.lease_seconds} and call_seconds {seconds}: they must be > 0"
            )
        messages = _json_of("messages_json", request.messages_json or "[]", list)
        metadata = _json_of("metadata_json", request.metadata_json or "{}", dict)
        tools = _json_of("tools_json", request.tools_json or "[]", list)
        sample = Sample(messages, request.answer, metadata, request.seed, tools)
        if name not in self._sessions:
            if len(self._sessions) >= MAX_SESSIONS:
                raise ResourceExhausted(f"there are {MAX_SESSIONS} sessions already: close some")
            self._sessions[name] = Session(request.lease_seconds, seconds, lambda: self._end(name))
        session = self._sessions[name]

        async def open_it() -> pb.OpenSessionResponse:
            environment = session.environment = await self._calls.call("__init__()", self._make, seconds=seconds)
            opened = None
            if isinstance(environment, FunctionConversation):
                environment.connect(request.model_url, request.model_key)
            if hasattr(environment, "open"):
                opened = await self._calls.call("open()", environment.open, sample, seconds=seconds)
            said = _checked(lambda: messages_of(opened, "open() returned"))
            tools = _checked(lambda: check_tools(getattr(environment, "tools", ())))
            return pb.OpenSessionResponse(
                messages_json=json.dumps(said), tools_json=json.dumps(tools), user_messages=take_messages()
            )

        try:
            return await session.answer(0, open_it)
        except (Aborted, DeadlineExceeded):
            self._end(name)
            raise

    async def Step(self, request: pb.StepRequest, context: Any) -> pb.StepResponse:
        session = self._sessions.get(request.session_id)
        if session is None:
            raise NotFound(f'session_id is "{request.session_id}": there is no such session, or its lease has ended')
        if request.turn < 1:
            raise InvalidArgument(f"turn is {request.turn}: turns count from 1", [("turn", "must be >= 1")])
        calls = [
            ToolCall(call.name, _json_of("tool_calls.arguments_json", call.arguments_json or "{}", dict), id=call.id)
            for call in request.tool_calls
        ]
        reply = Reply(request.text, tuple(calls), request.problem, request.finish_reason)

        async def step() -> pb.StepResponse:
            returned = await self._calls.call("step()", session.environment.step, reply, seconds=session.call_seconds)
            found = _checked(lambda: check_step(returned, calls))
            return pb.StepResponse(
                messages_json=json.dumps(found.observation),
                reward=found.reward,
                done=found.done,
                info=found.info,
                user_messages=take_messages(),
                player=found.player,
                rewards=found.rewards,
            )

        return await session.answer(request.turn, step)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        if (closing := self._end(request.session_id)) is not None:
            await asyncio.shield(closing)
        return pb.CloseSessionResponse()

    def _end(self, name: str) -> asyncio.Task[None] | None:
        """Start closing a session and return the task. Returns None if there is no such session."""
        session = self._sessions.pop(name, None)
        if session is None:
            return None
        task = asyncio.create_task(self._close(session), name=f"close {name}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def _close(self, session: Session) -> None:
        if isinstance(session.environment, FunctionConversation):
            session.environment.cancel()
        await session.finish()
        if hasattr(session.environment, "close"):
            await self._calls.call("close()", session.environment.close, seconds=session.call_seconds)


def _json_of(field: str, text: str, kind: type[Returned]) -> Returned:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise InvalidArgument(f"{field} isn't JSON: {error}", [(field, str(error))]) from error
    if not isinstance(found, kind):
        what = "a list" if kind is list else "an object"
        raise InvalidArgument(f"{field} is {text[:80]!r}: it must be {what}", [(field, f"must be {what}")])
    return found


def _checked(check: Callable[[], Returned]) -> Returned:
    try:
        return check()
    except BadEnvironmentError as error:
        raise Aborted(str(error)) from error


def end_together() -> None:
    """Fork a watcher that kills this process's group when this process ends, even if this process is killed.

    Without it, processes that an environment started would remain.
    """
    if not hasattr(os, "pidfd_open"):
        return
    host = os.getpid()
    if os.fork() == 0:
        with suppress(ProcessLookupError):  # it has ended
            select.select([os.pidfd_open(host)], [], [])
        os.killpg(host, signal.SIGKILL)


def main(name: str, settings_json: str = "{}", kind: str = "environment", memory_bytes: str = "0") -> None:
    """Serve an environment, or a function if `kind` is "function", until the parent process ends."""
    end_together()
    if most := int(memory_bytes):
        lower_limit(resource.RLIMIT_DATA, most)
    try:
        load = load_function if kind == "function" else load_environment
        make = load(name, json.loads(settings_json))
    except BadEnvironmentError as error:
        print(error, flush=True)
        sys.exit(REFUSED)
    ChildServer((environment_pb2_grpc.add_EnvironmentServicer_to_server, EnvironmentHandlers(make, most))).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
