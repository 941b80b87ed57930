"""The child's side of `relaxd.process.json_child`: answers requests, emits events, ends with its parent."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from relaxd.process.child import LIFELINE_VARIABLE
from relaxd.process.child_server import die_with_parent
from relaxd.process.frames import HEADER, FrameError, body_length, decode, encode
from relaxd.process.gpu_lease import end_with_lease

logger = logging.getLogger(__name__)

Handler = Callable[[dict[str, Any]], Any]


class HandlerError(Exception):
    """Raised by a handler to answer with an error and details for programs; `kind` defaults to the class name."""

    def __init__(self, message: str, details: Mapping[str, Any] | None = None, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.details = dict(details or {})
        self.kind = kind or type(self).__name__


class JsonChildServer:
    """Answers the parent's requests, each in its own thread, so that none waits for another."""

    def __init__(self, handlers: Mapping[str, Handler], connection: socket.socket | None = None) -> None:
        """`connection` leads to the parent; by default it is the one that `relaxd.process.child` passed on."""
        if connection is None:
            if LIFELINE_VARIABLE not in os.environ:
                raise RuntimeError(
                    f"{LIFELINE_VARIABLE} is not set: this program is started by its service, not by hand"
                )
            connection = socket.socket(fileno=int(os.environ.pop(LIFELINE_VARIABLE)))
        die_with_parent()
        end_with_lease()
        self._handlers = dict(handlers)
        self._socket = connection
        self._socket.set_inheritable(False)
        self._sending = threading.Lock()

    def emit(self, event: str, params: Mapping[str, Any]) -> None:
        """Send an event to the parent, from any thread. Raises FrameError, and sends nothing, when it is too large."""
        self._send(encode({"event": event, "params": dict(params)}))

    def serve(self) -> None:
        """Answer requests until the parent has ended; then end this process, even if its other threads hang."""
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
