"""Clients: channels that add a default deadline, the token, the trace context and retries to every call.

A call within a recorded span gets a child span, whose context travels with it.
"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span

from relaxd.rpc.access import may_repeat, methods
from relaxd.rpc.credentials import read_token
from relaxd.rpc.leader_term import TERM_METADATA
from relaxd.rpc.stack_identity import STACK_METADATA, read_stack_identity
from relaxd.rpc.tls import TlsFiles, open_channel
from relaxd.telemetry import inject
from relaxd.telemetry.spans import RpcMethod, end_client_span, open_client_span

MAX_MESSAGE_BYTES = 1 << 30
"""Maximum size of a gRPC message, in bytes. The largest messages are requests with all media of a conversation."""
DEFAULT_DEADLINE_SECONDS = 30.0
"""Default deadline of unary calls, in seconds."""
DEFAULT_STREAM_DEADLINE_SECONDS = 330.0
"""Default deadline of streaming calls, in seconds."""


def channel(
    address: str,
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    term: int = 0,
    stack: str | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Open a channel for coroutines.

    Args:
        address: host:port, or any gRPC target; with several addresses behind a name, calls go round-robin.
        token: bearer token; by default from the environment (see read_token).
        tls: TLS files; by default from the environment (see TlsFiles).
        term: the coordinator's term, which every call carries; 0: none.
        stack: identity of the caller's stack; by default from the environment (RELAXD_STACK).
        max_message_bytes: largest message.

    Calls without a timeout get a default deadline.

    Raises ValueError for invalid TLS files, OSError or ValueError for an invalid token in the environment.
    """
    plain = open_channel(grpc.aio, address, channel_options(max_message_bytes), tls or TlsFiles.from_environment())
    metadata = call_metadata(token, term, stack)
    return AsyncChannel(plain, metadata, address, DEFAULT_DEADLINE_SECONDS, DEFAULT_STREAM_DEADLINE_SECONDS)


def sync_channel(
    address: str,
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    term: int = 0,
    stack: str | None = None,
) -> grpc.Channel:
    """Open a synchronous gRPC channel, for threads and the command line; otherwise like `channel`."""
    plain = open_channel(grpc, address, channel_options(), tls or TlsFiles.from_environment())
    return grpc.intercept_channel(plain, _SyncInterceptor(call_metadata(token, term, stack)))


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Return the gRPC channel arguments of relaxd's clients: round robin, retries, message size, keepalive."""
    names = [
        {"service": method.containing_service.full_name, "method": method.name}
        for method in methods()
        if may_repeat(method)
    ]
    service_config = {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": names,
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
    }
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.service_config", json.dumps(service_config)),
        # Reconnect to a restarted service within a second, instead of gRPC's default of up to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Detect peers whose host vanished.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


Metadata: TypeAlias = list[tuple[str, Any]] | None
MakeMetadata: TypeAlias = Callable[..., Metadata]


def call_metadata(token: str | None, term: int = 0, stack: str | None = None) -> MakeMetadata:
    """Return a function that adds the token, the term, the stack's identity and a span's context to a call's metadata.

    The span is the function's second argument; by default the current one, if it is recorded.
    """
    token = token or read_token()
    fixed = [("authorization", f"Bearer {token}")] if token else []
    fixed += [(TERM_METADATA, str(term))] if term else []
    stack = read_stack_identity() if stack is None else stack
    fixed += [(STACK_METADATA, stack)] if stack else []

    def metadata(given: Any, span: Span | None = None) -> Metadata:
        # The usual case has no span, token, term or metadata, and builds nothing.
        span = trace.get_current_span() if span is None else span
        if span.is_recording():
            return [*(given or ()), *fixed, *inject(span).items()]
        return [*(given or ()), *fixed] if given or fixed else None

    return metadata


class MultiCallable:
    """A gRPC multi-callable that adds a default deadline, metadata and a span to its calls."""

    def __init__(
        self, call: Any, path: str, target: str, deadline_seconds: float | None, metadata: MakeMetadata
    ) -> None:
        """Wrap a gRPC multi-callable.

        Args:
            call: the multi-callable to wrap.
            path: the method's path, such as "/relaxd.v1.Reward/Score".
            target: name of the server in spans.
            deadline_seconds: default deadline of calls; None: no deadline.
            metadata: makes the metadata of a call, given the caller's metadata and the span.
        """
        self._call, self._deadline_seconds, self._metadata = call, deadline_seconds, metadata
        self._method = RpcMethod(path, target)

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        """Start a call of the method. `options` are passed on to grpc.aio's multi-callable."""
        timeout = self._deadline_seconds if timeout is None else timeout
        span = open_client_span(self._method)
        call = self._call(request, timeout=timeout, metadata=self._metadata(metadata, span), **options)
        if span is not None:
            call.add_done_callback(lambda ended: self._end_soon(span, ended))
        return call

    def _end_soon(self, span: Span, call: Any) -> None:
        """End a call's span in the event loop's next round, so that the response reaches the caller first."""
        asyncio.get_running_loop().call_soon(self._end, span, call, time.time_ns())

    def _end(self, span: Span, call: Any, ended_at: int) -> None:
        end_client_span(span, self._method, _status(call), ended_at)


def _status(call: Any) -> str:
    """Return the name of the gRPC status with which a call ended, such as "OK"."""
    asking = call.code()
    try:
        asking.send(None)  # a coroutine that need not wait
    except StopIteration as known:
        return str(known.value.name)
    asking.close()
    return grpc.StatusCode.UNKNOWN.name


# With grpc.aio's interceptors this would be four classes, one for each kind of call.


class AsyncChannel(grpc.aio.Channel):
    """A grpc.aio channel that adds relaxd's metadata, a default deadline and a span to each call."""

    def __init__(
        self,
        plain: grpc.aio.Channel,
        metadata: MakeMetadata,
        target: str,
        deadline_seconds: float | None,
        stream_deadline_seconds: float | None,
    ) -> None:
        """Wrap the channel `plain`.

        `metadata` makes each call's metadata, and `target` names the server in spans. The deadlines apply to calls
        without a timeout; None: no deadline.
        """
        self._plain, self._metadata, self._target = plain, metadata, target
        self._deadline_seconds, self._stream_deadline_seconds = deadline_seconds, stream_deadline_seconds

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        plain = self._plain.unary_unary(method, *arguments, **options)
        return MultiCallable(plain, method, self._target, self._deadline_seconds, self._metadata)

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        plain = self._plain.unary_stream(method, *arguments, **options)
        return MultiCallable(plain, method, self._target, self._stream_deadline_seconds, self._metadata)

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        plain = self._plain.stream_unary(method, *arguments, **options)
        return MultiCallable(plain, method, self._target, self._stream_deadline_seconds, self._metadata)

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        plain = self._plain.stream_stream(method, *arguments, **options)
        return MultiCallable(plain, method, self._target, self._stream_deadline_seconds, self._metadata)

    async def __aenter__(self) -> "AsyncChannel":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._plain.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._plain.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._plain.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._plain.channel_ready()


class _SyncInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds a default deadline and relaxd's metadata to the calls of a synchronous channel.

    Creates no spans, because only tools outside of traces use synchronous channels.
    """

    def __init__(self, metadata: MakeMetadata) -> None:
        self._metadata = metadata

    def _call(self, proceed: Any, details: Any, request: Any, deadline_seconds: float) -> Any:
        timeout = deadline_seconds if details.timeout is None else details.timeout
        return proceed(details._replace(timeout=timeout, metadata=self._metadata(details.metadata)), request)

    def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request, DEFAULT_DEADLINE_SECONDS)

    def intercept_unary_stream(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return self._call(continuation, client_call_details, request, DEFAULT_STREAM_DEADLINE_SECONDS)

    def intercept_stream_unary(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return self._call(continuation, client_call_details, request_iterator, DEFAULT_STREAM_DEADLINE_SECONDS)

    intercept_stream_stream = intercept_stream_unary
