"""A gRPC server that passes every call on, and tells on which one: to kill somebody at an exact place of a sequence."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

import grpc

from relaxd.rpc.client import MAX_MESSAGE_BYTES
from tests.chaos.proxy import HOST

Moment = Literal["asked", "passed_on", "answered"]
"""A request has come; it has been passed on (a moment ago); its answer has come and has not been passed back."""
PASSED_ON_SECONDS = 0.003
DEADLINE_SECONDS = 330.0
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
]


class Relay(grpc.GenericRpcHandler):
    """Stands before one service. Methods are of the loop that it was started in."""

    def __init__(self, name: str, port: int, target: int) -> None:
        self.name = name
        self.port = port
        self.target = target
        self._triggers: dict[tuple[str, Moment], Callable[[], None]] = {}

    async def start(self) -> None:
        """Listen."""
        self._channel = grpc.aio.insecure_channel(f"{HOST}:{self.target}", options=OPTIONS)
        self._server = grpc.aio.server(handlers=[self], options=OPTIONS)
        self._server.add_insecure_port(f"{HOST}:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        """End all calls."""
        await self._server.stop(0)
        await self._channel.close(None)

    async def arm(self, method: str, moment: Moment, action: Callable[[], None]) -> None:
        """Do `action` once, at that moment of the next call of a method (its last name)."""
        self._triggers[method, moment] = action

    async def disarm(self) -> None:
        """Forget what was armed."""
        self._triggers.clear()

    def service(self, handler_call_details: Any) -> Any:
        method = str(handler_call_details.method)

        async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for answer in self._pass_on(method, requests, context):
                yield answer

        # On the wire a unary call is a stream of one message.
        return grpc.stream_stream_rpc_method_handler(handle)

    def _reached(self, method: str, moment: Moment) -> None:
        action = self._triggers.pop((method.rpartition("/")[2], moment), None)
        if action is not None:
            action()

    async def _pass_on(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async def watched() -> AsyncIterator[bytes]:
            async for request in requests:
                self._reached(method, "asked")
                asyncio.get_running_loop().call_later(PASSED_ON_SECONDS, self._reached, method, "passed_on")
                yield request

        metadata = [(key, value) for key, value in context.invocation_metadata() if _ours(key)]
        call = self._channel.stream_stream(method, None, None)(
            watched(), timeout=context.time_remaining() or DEADLINE_SECONDS, metadata=metadata
        )
        try:
            async for answer in call:
                self._reached(method, "answered")
                yield answer
        except grpc.aio.AioRpcError as error:
            trailing = [(key, value) for key, value in error.trailing_metadata() if _ours(key)]
            await context.abort(error.code(), error.details() or "", tuple(trailing))
        finally:
            call.cancel()


def _ours(key: str) -> bool:
    """Whether a header belongs to the caller, not to the connection."""
    return not key.startswith((":", "grpc-accept", "grpc-timeout", "grpc-encoding")) and key not in (
        "user-agent",
        "te",
        "content-type",
    )
