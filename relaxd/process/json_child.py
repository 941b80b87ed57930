"""Children that exchange JSON messages with their parent over the lifeline. New children use `Child` and gRPC.

- request, parent to child: {"id", "method", "params"}
- reply, child to parent: {"id", "result"} or {"id", "error": {"kind", "message", "details"}}
- event, child to parent: {"event", "params"}
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Self

from relaxd.process.child import Child, ChildError, ChildExited
from relaxd.process.frames import HEADER, FrameError, body_length, decode, encode

logger = logging.getLogger(__name__)

EventHandler = Callable[[str, dict[str, Any]], None]


class ChildTimeout(ChildError):
    """The child did not answer in time. It may still be working on the request."""


class ChildRequestError(ChildError):
    """The child answered with an error: kind (a class name), message, and details for programs."""

    def __init__(self, kind: str, message: str, details: dict[str, Any]) -> None:
        super().__init__(message)
        self.kind = kind
        self.error_details = details


class JsonChild(Child):
    """A child that runs a JsonChildServer."""

    _on_event: EventHandler | None = None

    @classmethod
    async def start(cls, *arguments: Any, on_event: EventHandler | None = None, **options: Any) -> Self:
        """See Child; `on_event` is called with event and params, in the order in which the child emits."""
        child = await super().start(*arguments, **options)
        child._on_event = on_event
        child._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}  # type: ignore[misc]
        child._next_id = 0
        child.exited.add_done_callback(lambda _: child._fail_requests())
        return child

    _replies: dict[int, asyncio.Future[dict[str, Any]]]
    _next_id: int

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

    def _fail_requests(self) -> None:
        ended = self.exited.result()
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ChildExited(self.name, ended.exit_code, ended.last_lines))
