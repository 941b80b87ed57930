"""The parent's side of a child process that holds torch.

gRPC is not fork-safe and a stuck collective must not block a health check, so a service that needs torch is a parent
and its children. They exchange JSON messages over a socket pair that the child inherits (`relaxd.process.frames`):

- request, parent to child: {"id", "method", "params"}
- reply, child to parent: {"id", "result"} or {"id", "error": {"kind", "message", "details"}}
- event, child to parent: {"event", "params"}

`relaxd.process.child_server` is the child's side. It imports nothing of gRPC.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relaxd.process.frames import HEADER, FrameError, body_length, decode, encode
from relaxd.process.gpu_lease import LEASE_VARIABLE, GpuLease, LeaseOver

SOCKET_VARIABLE = "RELAXD_CHILD_FD"
"""Environment variable with the descriptor of the child's end of the socket pair."""

OUTPUT_LINES = 40
"""Number of last lines of a child's output that are kept for error messages."""

logger = logging.getLogger(__name__)

EventHandler = Callable[[str, dict[str, Any]], None]


class ChildError(Exception):
    """A child failed, or a request to it did."""


class ChildExited(ChildError):
    """The child has exited. Has its exit code (negative: the signal) and the last lines of its output."""

    def __init__(self, name: str, exit_code: int, last_lines: Sequence[str]) -> None:
        self.name = name
        self.exit_code = exit_code
        self.last_lines = list(last_lines)
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
        tail = ("; its last lines:\n" + "\n".join(self.last_lines[-10:])) if self.last_lines else ""
        super().__init__(f"{name} {how}{tail}")


class ChildTimeout(ChildError):
    """The child did not answer in time. It may still be working on the request."""


class ChildRequestError(ChildError):
    """The child answered with an error: kind (a class name), message, and details for programs."""

    def __init__(self, kind: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.kind = kind
        self.details = details


@dataclass(frozen=True)
class ChildExit:
    """The end of a child."""

    exit_code: int
    """Exit code; negative means the signal that killed it."""
    last_lines: tuple[str, ...]
    """Last lines of its stdout and stderr."""


class Child:
    """A running child process, owned by the event loop that started it.

    Start it from a thread that lives as long as the child should: Linux ends the child with that thread.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", on_event: EventHandler | None) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ChildExit] = self._loop.create_future()
        """Done as soon as the child has exited."""
        self._last_lines: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next_id = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        module: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        inherit: bool = True,
        python: str | None = None,
        name: str | None = None,
        on_event: EventHandler | None = None,
        gpu_lease: GpuLease | None = None,
    ) -> "Child":
        """Start `python -m module *args`.

        Args:
            module: module to run.
            args: its arguments.
            env: environment, on top of this process's with `inherit`, else alone.
            inherit: whether the child inherits this process's environment.
            python: another interpreter, which must be able to import `module`.
            name: name in messages; by default `module`.
            on_event: called with event and params in the event loop, in the order in which the child emits; must not
                block.
            gpu_lease: lease on the GPUs that the child uses, if it uses any; the child is killed when it is over.

        Raises ChildError when the lease is over already.
        """
        try:
            if gpu_lease is not None:
                gpu_lease.check()
        except LeaseOver as error:
            raise ChildError(f"{name or module} can't be started: {error}") from error
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {**(os.environ if inherit else {}), **(env or {}), SOCKET_VARIABLE: str(theirs.fileno())}
            inherited = [theirs.fileno()]
            if gpu_lease is not None:
                environment[LEASE_VARIABLE] = str(gpu_lease.descriptor)
                inherited.append(gpu_lease.descriptor)
            process = subprocess.Popen(
                [python or sys.executable, "-m", module, *args],
                env=environment,
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only the parent handles an interrupt from the terminal
            )
        child = cls(name or module, process, on_event)
        if gpu_lease is not None:
            gpu_lease.add(child)
            child.exited.add_done_callback(lambda _: gpu_lease.discard(child))
        ours.setblocking(False)
        reader, child._writer = await asyncio.open_connection(sock=ours)
        child._reading = asyncio.create_task(child._read(reader), name=f"read {child.name}")
        copier = threading.Thread(target=child._copy_output, name=f"output of {child.name}", daemon=True)
        copier.start()
        threading.Thread(target=child._watch, args=(copier,), name=f"watch {child.name}", daemon=True).start()
        return child

    @property
    def alive(self) -> bool:
        """True if the child runs."""
        return not self.exited.done()

    async def request(self, method: str, params: Mapping[str, Any] | None = None, timeout: float | None = 60.0) -> Any:
        """Call a method of the child and return its result.

        Raises ChildRequestError when the method failed, ChildTimeout after `timeout` seconds (None: never), ChildExited
        when the child has exited or exits meanwhile.
        """
        self._raise_if_exited()
        assert self._writer is not None
        self._next_id += 1
        request_id = self._next_id
        reply: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._replies[request_id] = reply
        try:
            async with asyncio.timeout(timeout):
                with contextlib.suppress(ConnectionError):  # the child is exiting: `exited` will be set in a moment
                    self._writer.write(encode({"id": request_id, "method": method, "params": dict(params or {})}))
                    await self._writer.drain()
                message = await reply
        except TimeoutError:
            raise ChildTimeout(f"{self.name} did not answer {method} within {timeout:g} s") from None
        finally:
            del self._replies[request_id]
        if "error" in message:
            error = message["error"]
            raise ChildRequestError(error["kind"], error["message"], error.get("details", {}))
        return message["result"]

    def kill(self) -> None:
        """Kill the child and every process that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, grace_seconds: float = 5.0) -> ChildExit:
        """Send SIGTERM to the child, and kill it after `grace_seconds`."""
        if self.alive:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await asyncio.shield(self.exited)
        self.kill()
        return await asyncio.shield(self.exited)

    def _raise_if_exited(self) -> None:
        if self.exited.done():
            ended = self.exited.result()
            raise ChildExited(self.name, ended.exit_code, ended.last_lines)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                body = await reader.readexactly(body_length(await reader.readexactly(HEADER.size)))
                self._receive(decode(body))
        except (asyncio.IncompleteReadError, ConnectionError):
            return  # the child is exiting; the watcher reports it
        except (FrameError, KeyError) as error:
            logger.error("%s sent an invalid message (%s): killing it", self.name, error)
            self.kill()

    def _receive(self, message: dict[str, Any]) -> None:
        if "event" in message:
            if self._on_event is not None:
                try:
                    self._on_event(message["event"], message["params"])
                except Exception:
                    logger.exception("the handler of event %s of %s failed", message["event"], self.name)
            return
        reply = self._replies.get(message["id"])
        if reply is not None and not reply.done():  # else it came after its deadline
            reply.set_result(message)

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\n")
            self._last_lines.append(text)
            print(text, file=sys.stderr, flush=True)

    def _watch(self, copier: threading.Thread) -> None:
        exit_code = self._process.wait()
        copier.join(timeout=1.0)  # a grandchild may hold the pipe open
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)

    def _on_exit(self, exit_code: int) -> None:
        ended = ChildExit(exit_code, tuple(self._last_lines))
        if not self.exited.done():
            self.exited.set_result(ended)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ChildExited(self.name, exit_code, ended.last_lines))
        if self._writer is not None:
            self._writer.close()
