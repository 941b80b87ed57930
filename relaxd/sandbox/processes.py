"""Starts and watches confined processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from relaxd.sandbox.channel import Channel, ChannelClosed, TooLong
from relaxd.sandbox.limits import ConfinementError, Limits, check
from relaxd.sandbox.running_time import LOOK_SECONDS, RunningClock

ZYGOTE_SECONDS = 30.0
"""Deadline of the zygote's answers, in seconds. Normally the zygote starts within 0.1 s, and answers within
milliseconds."""
IDLE_FACTOR = 3.0
"""Maximum elapsed time until a process answers, as a multiple of Limits.seconds, which limits its processor time."""
MESSAGE_ROOM = 1 << 16
"""Maximum bytes of a confined process's message in excess of Limits.output_bytes, for the text around the result."""
ZYGOTE = ("-m", "relaxd.sandbox.zygote")
"""Arguments of the Python interpreter for starting the zygote, the process from which confined ones are forked."""
_ROOT = str(Path(__file__).parents[2])


class Stopped(Exception):
    """A confined process was stopped or ended before it answered. The message says why."""


class Sandbox:
    """Starts confined processes under the same limits. Use a sandbox in a single thread, and close it afterwards."""

    def __init__(self, limits: Limits) -> None:
        """Create a sandbox whose processes have these limits. Raises ConfinementError if the machine can't confine
        processes."""
        check(limits)
        self.limits = limits
        self.clock = RunningClock()
        """Clock by which the deadlines of processes are given."""
        self._zygote: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(
        self, job: dict[str, Any], deadline: float, stdin: int | None = None, stdout: int | None = None
    ) -> "Confined":
        """Start a confined process that executes a job (see `relaxd.sandbox.program`).

        Args:
            job: the process's job.
            deadline: time by `clock` at which the process is stopped.
            stdin: file descriptor of the process's standard input; by default empty.
            stdout: file descriptor of the process's standard output; by default output is discarded.

        Raises ConfinementError if the machine can't confine the process, and Stopped.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno()] if stdin is None or stdout is None else [theirs.fileno(), stdin, stdout]
            pid = int(self._ask(b"start", files))
        process = Confined(self, pid, Channel(ours, self.limits.output_bytes + MESSAGE_ROOM), deadline)
        try:
            begun = process.receive()
            if "ready" not in begun:
                raise ConfinementError(str(begun.get("unconfined")))
            process.send(job)
        except BaseException:
            process.end()
            raise
        return process

    def run(self, job: dict[str, Any], deadline: float, stdin: str = "") -> "tuple[str, Stopped | None]":
        """Execute a job in a new process until it ends. Returns the output, and why the job was stopped or failed, if
        it was.

        Raises ConfinementError.
        """
        with open(os.memfd_create("stdin"), "w+b") as given, open(os.memfd_create("stdout"), "rb") as printed:
            given.write(stdin.encode())
            given.seek(0)
            problem: Stopped | None = None
            try:
                process = self.start(job, deadline, given.fileno(), printed.fileno())
                try:
                    found = process.receive()
                    problem = None if "ended" in found else Stopped(str(found))
                finally:
                    process.end()
            except Stopped as error:
                problem = error
            return os.pread(printed.fileno(), self.limits.output_bytes, 0).decode(errors="replace"), problem

    def end(self, pid: int) -> int:
        """Kill the confined process with the id `pid`, and return its wait status."""
        return int(self._ask(b"end %d" % pid))

    def close(self) -> None:
        """Kill the zygote, and with it all confined processes."""
        if self._control is not None:
            self._control.close()
        if self._zygote is not None:
            self._zygote.kill()
            self._zygote.wait(timeout=ZYGOTE_SECONDS)
        self._zygote = self._control = None

    def _ask(self, order: bytes, files: Sequence[int] = ()) -> bytes:
        """Send a request to the zygote, and return its answer. Starts the zygote if it isn't running. Raises
        ConfinementError."""
        self.clock.plan(LOOK_SECONDS)  # a zygote that takes longer is not the answer's fault, either
        try:
            control = self._control or self._start_zygote()
            socket.send_fds(control, [order], files)
            if answer := control.recv(64):
                return answer
            reason = "it has ended"
        except (OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
        finally:
            self.clock.now()
        self.close()
        raise ConfinementError(f"the process that starts confined ones doesn't answer: {reason}")

    def _start_zygote(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ZYGOTE_SECONDS)
        environment = {
            "PATH": os.defpath,
            "LANG": "C.UTF-8",
            "PYTHONPATH": _ROOT,
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "MALLOC_ARENA_MAX": "1",  # each arena reserves memory, which is limited
            **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = [sys.executable, "-s", "-P", *ZYGOTE]
            self._zygote = subprocess.Popen(
                [*command, str(theirs.fileno()), json.dumps(asdict(self.limits))],
                env=environment,
                cwd="/",
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._control = ours
        if not ours.recv(64):
            raise OSError("it can't start; its log says why")
        return ours


class Confined:
    """A running confined process, with which messages are exchanged within its limits of time."""

    def __init__(self, sandbox: Sandbox, pid: int, channel: Channel, deadline: float) -> None:
        self._sandbox = sandbox
        self._pid: int | None = pid
        self._clock = (~pid << 3) | 2  # the process's CPU-time clock, as from pthread_getcpuclockid
        self._channel = channel
        self._deadline = deadline

    @property
    def alive(self) -> bool:
        """True until `end` is called or the process exceeds a limit; a process that crashed counts as alive until the
        next message."""
        return self._pid is not None

    def send(self, message: Any) -> None:
        """Send a message to the process. Raises Stopped if the process has ended, or exceeds a limit."""
        self._within_limits(lambda left: self._channel.send(message, left))

    def receive(self) -> Any:
        """Return the process's next message. Kills the process and raises Stopped if it computes or waits for too
        long."""
        found = self._within_limits(self._channel.receive)
        if not isinstance(found, dict):
            self._stop("sent something else than a message")
        return found

    def end(self) -> int:
        """Kill the process, and return its wait status, for os.waitstatus_to_exitcode."""
        if self._pid is None:
            return 0
        pid, self._pid = self._pid, None
        self._channel.close()
        return self._sandbox.end(pid)

    def _within_limits(self, act: Callable[[Callable[[], float]], Any]) -> Any:
        if self._pid is None:
            raise Stopped("it was ended")
        seconds = self._sandbox.limits.seconds
        computed = self._computed()
        clock = self._sandbox.clock
        latest = min(self._deadline, clock.now() + IDLE_FACTOR * seconds)

        def left() -> float:
            computing = seconds - (self._computed() - computed)
            waiting = latest - clock.now()
            if computing <= 0:
                self._stop(f"computed for longer than {seconds:g} s")
            if waiting <= 0:
                self._stop("did not end in time")
            return clock.plan(min(computing, waiting))

        try:
            return act(left)
        except TooLong:
            self._stop(f"returned more than {self._sandbox.limits.output_bytes} bytes")
        except ChannelClosed:
            code = os.waitstatus_to_exitcode(self.end())
            raise Ended(code) from None
        finally:
            clock.now()

    def _computed(self) -> float:
        return time.clock_gettime(self._clock)

    def _stop(self, reason: str) -> None:
        self.end()
        raise Stopped(f"it {reason}")


class Ended(Stopped):
    """A confined process exited or crashed before it answered."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"it ended with {describe_exit(exit_code)}")
        self.exit_code = exit_code


def describe_exit(exit_code: int) -> str:
    """Describe a process's exit code for people: "exit code N", or the signal's name if the code is negative."""
    return f"exit code {exit_code}" if exit_code >= 0 else signal.Signals(-exit_code).name
