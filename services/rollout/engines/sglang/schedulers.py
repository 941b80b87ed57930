"""Control connections from the engine's process to SGLang's scheduler processes, beside SGLang's own.

Each scheduler process (one per tensor-parallel rank) connects to a Unix socket and answers requests there
(`services.rollout.engines.sglang.scheduler`), in the frames of `relaxd.process.frames`. A connection that closes means
that the process has died.
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
"""Environment variable with the path of the socket, for the scheduler processes."""


class SchedulerError(Exception):
    """A scheduler process answered with an error, was late, or died. `kind` is the class name of the error there."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _Connection:
    """The connection to one scheduler process."""

    def __init__(
        self, connection: socket.socket, on_event: Callable[["_Connection", str, dict[str, Any]], None]
    ) -> None:
        self.rank = -1
        self._socket = connection
        self._on_event = on_event
        self._sending = threading.Lock()
        self._replies: dict[int, Future[Any]] = {}
        self._ids = itertools.count(1)
        threading.Thread(target=self._read, name="read a scheduler", daemon=True).start()

    def ask(self, method: str, params: Mapping[str, Any]) -> "Future[Any]":
        """Send a request. The future gets its result or a SchedulerError."""
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
                message = decode(self._receive_exactly(body_length(self._receive_exactly(HEADER.size))))
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

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError("the connection ended")
            data += piece
        return bytes(data)


class Schedulers:
    """The scheduler processes of an engine, by rank."""

    def __init__(self, on_gone: Callable[[int], None]) -> None:
        """`on_gone` is called with the rank of a scheduler process that died."""
        self._on_gone = on_gone
        self._changed = threading.Condition()
        self._connections: dict[int, _Connection] = {}
        self.failure = ""
        """Reason that a scheduler process gave when it failed to start; empty before."""
        self.folder = Path(tempfile.mkdtemp(prefix="relaxd-sglang-"))
        """Folder of the socket. `stop_listening` removes it."""
        self.address = str(self.folder / "control")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="accept schedulers", daemon=True).start()

    def wait_for(self, count: int, timeout: float) -> None:
        """Wait until `count` scheduler processes are connected. Raises SchedulerError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._connections) >= count or self.failure, timeout):
                raise SchedulerError(
                    "Timeout", f"{len(self._connections)} of {count} schedulers connected within {timeout:g} s"
                )
            if self.failure:
                raise SchedulerError("LoadError", self.failure)

    def wait_for_failure(self, timeout: float) -> str:
        """Return a scheduler process's reason for its failure, if it comes within `timeout`, else ""."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, timeout)
            return self.failure

    def stop_listening(self) -> None:
        """Accept no more connections, and remove the socket's folder."""
        self._listener.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def ask_each(self, method: str, params: Mapping[str, Any], timeout: float) -> list[Any]:
        """Return each rank's result or SchedulerError, once all have answered or `timeout` has passed."""
        deadline = time.monotonic() + timeout
        replies = [self._connections[rank].ask(method, params) for rank in sorted(self._connections)]
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
        """Return the results by rank. Raises the first SchedulerError, once all have answered or are late."""
        answers = self.ask_each(method, params, timeout)
        for answer in answers:
            if isinstance(answer, SchedulerError):
                raise answer
        return answers

    def ask_first(self, method: str, params: Mapping[str, Any], timeout: float) -> Any:
        """Return the result of rank 0. Raises SchedulerError."""
        try:
            return self._connections[0].ask(method, params).result(timeout)
        except FutureTimeout:
            raise SchedulerError("Timeout", f"scheduler 0 did not answer {method} within {timeout:g} s") from None

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # stop_listening was called
            _Connection(connection, self._on_event)

    def _on_event(self, connection: _Connection, event: str, params: dict[str, Any]) -> None:
        with self._changed:
            if event == "hello":
                connection.rank = params["rank"]
            elif event == "ready":
                self._connections[connection.rank] = connection
            elif event == "failed":
                self.failure = self.failure or params["reason"]
            self._changed.notify_all()
        if event == "gone" and connection.rank in self._connections:
            self._on_gone(connection.rank)
