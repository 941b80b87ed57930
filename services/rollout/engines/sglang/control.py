"""The line between the engine's process and SGLang's scheduler processes, beside SGLang's own.

Each scheduler process (one per tensor-parallel rank) connects to a Unix socket and answers requests there
(`services.rollout.engines.sglang.scheduler`), in the frames of `relaxd.process.frames`. An end of the line that nobody
asked for means that the process died.
"""

import itertools
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

from relaxd.process.frames import HEADER, FrameError, body_length, decode, encode

ADDRESS_VARIABLE = "RELAXD_SGLANG_CONTROL"
"""Environment variable that tells scheduler processes where to connect."""


class SchedulerError(Exception):
    """A scheduler process answered with an error, not in time, or died. `kind` is the error's class name there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Line:
    """One scheduler process."""

    def __init__(self, connection: socket.socket, on_event: Callable[["_Line", str, dict[str, Any]], None]) -> None:
        self.rank = -1
        self._socket = connection
        self._on_event = on_event
        self._sending = threading.Lock()
        self._replies: dict[int, Future[Any]] = {}
        self._ids = itertools.count(1)
        threading.Thread(target=self._read, name="read a scheduler", daemon=True).start()

    def ask(self, method: str, params: Mapping[str, Any]) -> "Future[Any]":
        """Send a request; the future has its result, or a SchedulerError."""
        number, reply = next(self._ids), Future[Any]()
        self._replies[number] = reply
        try:
            with self._sending:
                self._socket.sendall(encode({"id": number, "method": method, "params": dict(params)}))
        except OSError as error:
            self._replies.pop(number, None)
            reply.set_exception(SchedulerError("SchedulerGone", f"scheduler {self.rank} is gone: {error}"))
        return reply

    def _read(self) -> None:
        try:
            while True:
                message = decode(self._exactly(body_length(self._exactly(HEADER.size))))
                if "event" in message:
                    self._on_event(self, message["event"], message["params"])
                    continue
                reply = self._replies.pop(message["id"], None)
                if reply is None:
                    continue
                if "error" in message:
                    reply.set_exception(SchedulerError(message["error"]["kind"], message["error"]["message"]))
                else:
                    reply.set_result(message["result"])
        except (OSError, EOFError, FrameError) as error:
            for reply in list(self._replies.values()):
                if not reply.done():
                    reply.set_exception(SchedulerError("SchedulerGone", f"scheduler {self.rank} is gone"))
            self._on_event(self, "gone", {"reason": str(error)})

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError("the connection ended")
            data += piece
        return bytes(data)


class Schedulers:
    """All scheduler processes of an engine, in the order of their ranks once they are there."""

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        """`on_gone` is called with the rank of a scheduler process that died."""
        self._on_gone = on_gone
        self._changed = threading.Condition()
        self._lines: dict[int, _Line] = {}
        self.failure = ""
        """What a scheduler process said when it could not be started."""
        self.folder = Path(tempfile.mkdtemp(prefix="relaxd-sglang-"))
        """Holds sockets. To be removed, by `close_door`, when everyone is connected."""
        self.address = str(self.folder / "control")
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(self.address)
        self._door.listen(64)
        threading.Thread(target=self._accept, name="accept schedulers", daemon=True).start()

    def wait_for(self, count: int, timeout: float) -> None:
        """Until `count` scheduler processes are connected. Raises SchedulerError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._lines) >= count or self.failure, timeout):
                raise SchedulerError("Timeout", f"{len(self._lines)} of {count} schedulers came within {timeout:g} s")
            if self.failure:
                raise SchedulerError("LoadError", self.failure)

    def wait_for_failure(self, timeout: float) -> str:
        """What a scheduler process said about its failure, if it says so within `timeout`."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, timeout)
            return self.failure

    def close_door(self) -> None:
        """Let nobody in any more, and leave nothing on the disk."""
        self._door.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask_each(self, method: str, params: Mapping[str, Any], timeout: float) -> list[Any]:
        """The result, or the SchedulerError, of each by rank, once all have answered or it is late."""
        deadline = time.monotonic() + timeout
        replies = [self._lines[rank].ask(method, params) for rank in sorted(self._lines)]
        answers: list[Any] = []
        for rank, reply in enumerate(replies):
            try:
                answers.append(reply.result(max(deadline - time.monotonic(), 0.0)))
            except SchedulerError as error:
                answers.append(error)
            except FutureTimeout:
                late = f"scheduler {rank} did not answer {method} within {timeout:g} s"
                answers.append(SchedulerError("Timeout", late))
        return answers

    def ask_all(self, method: str, params: Mapping[str, Any], timeout: float) -> list[Any]:
        """The results of all, by rank. Raises the first SchedulerError, once all have answered or it is late."""
        answers = self.ask_each(method, params, timeout)
        for answer in answers:
            if isinstance(answer, SchedulerError):
                raise answer
        return answers

    def ask_first(self, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        """The result of rank 0. Raises SchedulerError."""
        try:
            return self._lines[0].ask(method, params).result(timeout)
        except FutureTimeout:
            raise SchedulerError("Timeout", f"scheduler 0 did not answer {method} within {timeout:g} s") from None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._door.accept()
            except OSError:
                return  # the door is closed
            _Line(connection, self._on_event)

    def _on_event(self, line: _Line, event: str, params: dict[str, Any]) -> None:
        with self._changed:
            if event == "hello":
                line.rank = params["rank"]
            elif event == "ready":
                self._lines[line.rank] = line
            elif event == "failed":
                self.failure = self.failure or params["reason"]
            self._changed.notify_all()
        if event == "gone" and line.rank in self._lines:
            self._on_gone(line.rank)
