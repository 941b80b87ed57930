"""Sessions of an environment's host: conversations, each with its own instance of a user's class.

Plain methods run in threads and async ones in a separate event loop, so that a method that hangs keeps no other session
waiting, and never the server.
"""

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from relaxd.envs.environment import BadEnvironmentError
from relaxd.importing import describe_error
from relaxd.process.upkeep import IdleThreads
from relaxd.rpc.errors import Aborted, DeadlineExceeded, FailedPrecondition, RpcError

MAX_STUCK = 200
"""Maximum number of threads blocked by late calls. Above it the process ends, and a new one is started."""
Answer = TypeVar("Answer")

_HERE = os.path.dirname(__file__) + os.sep
_log = logging.getLogger(__name__)


class UserCalls:
    """Calls users' methods, each with a limit of time."""

    def __init__(self, memory_bytes: int = 0) -> None:
        """With a memory limit, a method that runs out of memory ends this process and its sessions."""
        # Encoded now: afterwards there may be no memory for it.
        reason = f"agent.memory_bytes = {memory_bytes} is used up: raise it, or free what conversations leave behind\n"
        self._last_words = reason.encode() if memory_bytes else b""
        self._threads = IdleThreads()
        self._loop = asyncio.new_event_loop()
        self._stuck = 0
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="async methods", daemon=True)
        self._loop_thread.start()

    async def call(self, what: str, method: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """Call a method, and await what it returns if it is async.

        Args:
            what: its name in errors, such as "step()".
            method: a function of the user's.
            arguments: its arguments.
            seconds: limit of time.

        Raises Aborted: it raised; DeadlineExceeded. A method that isn't async then still runs: see MAX_STUCK.
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
    """Return a thread's location in the user's code, as " (at env.py:12, in step)", or ""."""
    frame = sys._current_frames().get(thread)
    frames = traceback.extract_stack(frame) if frame is not None else []
    ours = [index for index, one in enumerate(frames) if one.filename.startswith(_HERE)]
    below = frames[ours[-1] + 1 :] if ours else []
    own = [one for one in below if one.filename == below[0].filename]
    return f" (at {os.path.basename(own[-1].filename)}:{own[-1].lineno}, in {own[-1].name})" if own else ""


class Session:
    """A conversation. It answers its turns in order and once, even if the client repeats them."""

    def __init__(self, lease_seconds: float, call_seconds: float, on_over: Callable[[], Any]) -> None:
        """`on_over` is called when the lease has ended."""
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
        """Return the answer to a turn, which `make` makes unless it was made before.

        Turn 0 opens the session. Raises FailedPrecondition: it is neither the last turn nor the next one, or the
        session has failed at an earlier one.
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
        return await asyncio.shield(self._answer)  # a caller that leaves doesn't end it

    async def finish(self) -> None:
        """End the lease, and wait for an answer that is being made."""
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
