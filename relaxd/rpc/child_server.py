"""The child's side of `relaxd.rpc.child`: answers requests, emits events, and never outlives its parent."""

import ctypes
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from relaxd.rpc.child import SOCKET_VARIABLE
from relaxd.rpc.frames import HEADER, FrameError, body_length, decode, encode
from relaxd.rpc.gpu_lease import end_with_lease

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>

logger = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Any]


class HandlerError(Exception):
    """Raised by a handler to answer with details that a program can read; `kind` defaults to the class name."""

    def __init__(self, message: str, details: Mapping[str, Any] | None = None, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})
        self.kind = kind or type(self).__name__


class ChildServer:
    """Answers the parent's requests, each in a thread of its own, so that one that waits holds up no other."""

    def __init__(self, handlers: Mapping[str, Handler], connection: socket.socket | None = None) -> None:
        """`connection` leads to the parent; without one it is what `relaxd.rpc.child` passed on."""
        if connection is None:
            if SOCKET_VARIABLE not in os.environ:
                raise RuntimeError(f"{SOCKET_VARIABLE} is not set: this program is started by its service, not by hand")
            connection = socket.socket(fileno=int(os.environ.pop(SOCKET_VARIABLE)))
        die_with_parent()
        end_with_lease()
        self._handlers = dict(handlers)
        self._socket = connection
        self._socket.set_inheritable(False)
        self._sending = threading.Lock()

    def emit(self, event: str, params: Mapping[str, Any]) -> None:
        """Tell the parent something unasked. Safe from any thread. Raises FrameError: it is too large, and not sent."""
        self._send(encode({"event": event, "params": dict(params)}))

    def serve(self) -> None:
        """Answer until the parent is gone; then end this process, whatever its other threads are stuck in."""
        try:
            while True:
                header = self._receive_exactly(HEADER.size)
                message = decode(self._receive_exactly(body_length(header)))
                name = f"request {message['method']}"
                threading.Thread(target=self._answer, args=(message,), name=name, daemon=True).start()
        except (EOFError, ConnectionError):
            os._exit(0)
        except BaseException:
            logger.exception("the connection to the parent broke")
            os._exit(1)

    def _answer(self, message: dict[str, Any]) -> None:
        method = message["method"]
        try:
            handler = self._handlers.get(method)
            if handler is None:
                raise HandlerError(f"no method {method!r}; there are {sorted(self._handlers)}", kind="UnknownMethod")
            reply = {"id": message["id"], "result": handler(message["params"])}
        except HandlerError as error:
            details = {"kind": error.kind, "message": str(error), "details": error.details}
            reply = {"id": message["id"], "error": details}
        except Exception as error:
            logger.exception("%s failed", method)
            text = str(error) or type(error).__name__
            reply = {"id": message["id"], "error": {"kind": type(error).__name__, "message": text, "details": {}}}
        try:
            data = encode(reply)
        except FrameError as error:
            logger.error("the answer to %s can't be sent: %s", method, error)
            details = {"kind": "FrameError", "message": f"the answer to {method} is {error}", "details": {}}
            data = encode({"id": message["id"], "error": details})
        self._send(data)

    def _send(self, data: bytes) -> None:
        with self._sending:
            try:
                self._socket.sendall(data)
            except ConnectionError:
                os._exit(0)

    def _receive_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = self._socket.recv(min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, also while no Python code can run here.

    If the parent is dead already, the socket's end says so.
    """
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except AttributeError:
        logger.debug("no prctl here: only the socket's end tells that the parent died")
