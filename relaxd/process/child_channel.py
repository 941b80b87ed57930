"""The channel of a child process: its stubs wait until the child serves, and raise what explains a failure."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from relaxd.rpc.client import AsyncChannel, call_metadata
from relaxd.rpc.errors import DeadlineExceeded, Unavailable, from_call, has_status

EXIT_SECONDS = 5.0
"""Time after a broken call in which the child's exit explains it."""
OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.client_idle_timeout_ms", 2**31 - 1),  # the socket's file is gone: there is no second connection
    ("grpc.enable_http_proxy", 0),
]


class ChildChannel(AsyncChannel):
    """A channel for stubs, whose calls differ from gRPC's own in three ways.

    - `timeout` has to be given; None means no deadline.
    - They raise RpcError: the one that the child's handler raised, DeadlineExceeded after `timeout` seconds, or
      ChildExited if the child has exited or exits meanwhile.
    - A streaming call is an asynchronous generator; closing it cancels the call.
    """

    def __init__(
        self,
        target: str,
        token: str,
        name: str,
        wait_connected: Callable[[], Awaitable[None]],
        wait_exited: Callable[[float], Awaitable[None]],
    ) -> None:
        """See Child for the two functions; `name` is the child's."""
        plain = grpc.aio.insecure_channel(target, OPTIONS)
        super().__init__(plain, call_metadata(token), target, deadline_seconds=None, stream_deadline_seconds=None)
        self._name = name
        self._wait_connected = wait_connected
        self._wait_exited = wait_exited

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        plain = super().unary_unary(method, *arguments, **options)

        async def call(request: Any, *, timeout: float | None) -> Any:
            async with self._explaining(method, timeout) as left:
                return await plain(request, timeout=left)

        return call

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._streaming(method, super().unary_stream(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._streaming(method, super().stream_stream(method, *arguments, **options))

    def _streaming(self, method: str, plain: Any) -> Any:
        async def call(request: Any, *, timeout: float | None) -> AsyncIterator[Any]:
            async with self._explaining(method, timeout) as left:
                running = plain(request, timeout=left)
                try:
                    async for response in running:
                        yield response
                finally:
                    running.cancel()

        return call

    @asynccontextmanager
    async def _explaining(self, method: str, timeout: float | None) -> AsyncIterator[float | None]:
        """Wait until the child serves, yield the rest of `timeout`, and translate the errors of a call."""
        clock = asyncio.get_running_loop().time
        deadline = None if timeout is None else clock() + timeout
        late = f"{self._name} did not answer {method.rpartition('/')[2]} within {timeout or 0:g} s"
        try:
            async with asyncio.timeout_at(deadline):
                await self._wait_connected()
        except TimeoutError:
            raise DeadlineExceeded(late) from None
        try:
            yield None if deadline is None else max(deadline - clock(), 0.0)
        except grpc.aio.AioRpcError as error:
            if has_status(error):
                raise from_call(error) from None
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(late) from None
            await self._wait_exited(EXIT_SECONDS)
            raise Unavailable(f"{self._name}: {error.code().name}: {error.details()}") from None
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if task is not None and not task.cancelling():  # the channel was closed, because the child has exited
                await self._wait_exited(0)
            raise
