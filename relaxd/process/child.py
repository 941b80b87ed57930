"""The parent's side of a child process.

A stuck collective must not block a health check, so a service runs torch in child processes. A child serves gRPC on a
Unix socket (`relaxd.process.child_server`), and the parent calls it through ordinary stubs on `Child.channel`. The
socket is in a folder that only this user can enter, the child accepts calls only with a token made for this launch, and
the folder is removed as soon as the parent is connected.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from relaxd.process.child_channel import ChildChannel
from relaxd.process.gpu_lease import LEASE_VARIABLE, GpuLease, LeaseOver
from relaxd.rpc.errors import Unavailable
from relaxd.telemetry.logs import escape

LIFELINE_VARIABLE = "RELAXD_CHILD_LIFELINE"
"""Environment variable with the file descriptor of the lifeline, a socket whose other end the parent holds. The
socket closes when the parent ends."""
SOCKET_VARIABLE = "RELAXD_CHILD_SOCKET"
"""Environment variable with the path of the Unix socket on which the child serves."""
TOKEN_VARIABLE = "RELAXD_CHILD_TOKEN"
"""Environment variable with the token that the child requires of callers."""

OUTPUT_LINES = 40
"""Maximum number of a child's last output lines that are kept for error messages."""
KILL_SECONDS = 5.0
"""Maximum seconds to wait for a killed child to end."""

logger = logging.getLogger(__name__)


class ChildError(Unavailable):
    """A child process could not be started, or has exited."""


class ChildExited(ChildError):
    """A child process has exited. Holds its exit code (negative: the signal that killed it) and last lines of
    output."""

    def __init__(self, name: str, exit_code: int, last_lines: Sequence[str]) -> None:
        self.name = name
        self.exit_code = exit_code
        self.last_lines = list(last_lines)
        tail = ("; its last lines:\n" + "\n".join(self.last_lines[-10:])) if self.last_lines else ""
        super().__init__(f"{name} {ChildExit(exit_code)}{tail}")


@dataclass(frozen=True)
class ChildExit:
    """Outcome of a child process: its exit code and its last lines of output."""

    exit_code: int
    """Exit code of the child. If a signal killed the child: the signal's number, negative."""
    last_lines: tuple[str, ...] = ()
    """Last lines of the child's stdout and stderr."""

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"was killed by signal {-self.exit_code}"
        return f"exited with code {self.exit_code}"


@contextlib.contextmanager
def _failing_as_child_error(name: str) -> Iterator[None]:
    try:
        yield
    except (LeaseOver, OSError, RuntimeError, MemoryError) as error:  # RuntimeError: no thread can be started
        raise ChildError(f"{name} can't be started: {error}") from error


def _remove(folder: Path) -> None:
    """Remove the folder of a child's socket. Unlike shutil.rmtree, this needs no free file descriptor."""
    (folder / "socket").unlink(missing_ok=True)
    folder.rmdir()


class Child:
    """A running child process, owned by the event loop that started it.

    Start it from a thread that outlives the child: Linux ends the child when that thread ends.
    """

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        folder: Path,
        token: str,
        filter_output: Callable[[str], Iterable[str]],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._folder = folder
        self._loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[ChildExit] = self._loop.create_future()
        """Future that is done when the child has exited."""
        self._connected: asyncio.Future[None] = self._loop.create_future()
        self._filter_output = filter_output
        self._last_lines: deque[str] = deque(maxlen=OUTPUT_LINES)
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Future[None] | None = None
        self.channel = ChildChannel(f"unix:{folder / 'socket'}", token, name, self.wait_connected, self.wait_exited)
        """gRPC channel to the child, for stubs of the services that it serves."""

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
        gpu_lease: GpuLease | None = None,
        filter_output: Callable[[str], Iterable[str]] = lambda line: (line,),
    ) -> Self:
        """Start `python -m module *args`. Calls on `channel` wait until the child serves.

        Args:
            module: module to run.
            args: arguments of the module.
            env: environment variables, added to this process's if `inherit` is set.
            inherit: whether the child inherits this process's environment.
            python: another interpreter, which must be able to import `module`.
            name: name in messages; by default `module`.
            gpu_lease: lease on the child's GPUs, if it uses any; the child is killed when the lease ends.
            filter_output: maps a line of the child's output to the lines to show on this process's stderr and in
                errors.

        Raises ChildError if the lease has ended, or no process can be started: descriptors, processes or memory are
        exhausted, or the interpreter is missing.
        """
        name = name or module
        with _failing_as_child_error(name), contextlib.ExitStack() as undo:
            if gpu_lease is not None:
                gpu_lease.check()
            folder, token = Path(tempfile.mkdtemp(prefix="relaxd-")), secrets.token_urlsafe()
            undo.callback(_remove, folder)
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs:
                environment = {
                    "GRPC_ENABLE_FORK_SUPPORT": "0",  # processes that a child forks make no gRPC calls
                    **(os.environ if inherit else {}),
                    **(env or {}),
                    LIFELINE_VARIABLE: str(theirs.fileno()),
                    SOCKET_VARIABLE: str(folder / "socket"),
                    TOKEN_VARIABLE: token,
                }
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
            undo.callback(process.wait, timeout=KILL_SECONDS)
            undo.callback(process.kill)
            child = cls(name, process, folder, token, filter_output)
            if gpu_lease is not None:
                gpu_lease.add(child)
                child.exited.add_done_callback(lambda _: gpu_lease.discard(child))
                undo.callback(gpu_lease.discard, child)
            ours.setblocking(False)
            reader, child._writer = await asyncio.open_connection(sock=ours)
            undo.callback(child._writer.close)
            child._reading = asyncio.create_task(child._read(reader), name=f"read {child.name}")
            copier = threading.Thread(target=child._copy_output, name=f"output of {child.name}", daemon=True)
            copier.start()
            threading.Thread(target=child._watch, args=(copier,), name=f"watch {child.name}", daemon=True).start()
            undo.pop_all()
        return child

    @property
    def alive(self) -> bool:
        """True if the child process hasn't exited."""
        return not self.exited.done()

    def rename(self, name: str) -> None:
        """Change the child's name in log and error messages."""
        self.name = self.channel.name = name

    async def wait_connected(self) -> None:
        """Wait until the child serves calls. Raises ChildExited if the child exits before."""
        if not self._connected.done():
            either: set[asyncio.Future[Any]] = {self._connected, self.exited}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_exited()

    async def wait_exited(self, seconds: float) -> None:
        """Wait up to `seconds` for the child to exit. Raises ChildExited if it does."""
        await asyncio.wait({self.exited}, timeout=seconds)
        self._raise_if_exited()

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
        """Connect the channel once the child reports that it listens."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, grpc.aio.UsageError):  # it has exited
            await reader.readexactly(1)
            await self.channel.channel_ready()
            shutil.rmtree(self._folder, ignore_errors=True)
            self._connected.set_result(None)

    def _copy_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                for text in self._filter_output(escape(line.decode(errors="replace").rstrip("\n"), keep="\t")):
                    self._last_lines.append(text)
                    print(text, file=sys.stderr, flush=True)

    def _watch(self, copier: threading.Thread) -> None:
        exit_code = self._process.wait()
        copier.join(timeout=1.0)  # a grandchild may hold the pipe open
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)

    def _on_exit(self, exit_code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(ChildExit(exit_code, tuple(self._last_lines)))
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._closing = asyncio.ensure_future(self.channel.close())
