"""Clients: channels that add a default deadline, the token, the trace context and retries to every call."""

import json
from collections.abc import Callable
from typing import Any

import grpc
from opentelemetry import trace

from relaxd.rpc.credentials import read_token
from relaxd.rpc.methods import may_repeat, methods
from relaxd.rpc.terms import TERM_METADATA
from relaxd.rpc.tls import TlsFiles, open_channel
from relaxd.telemetry import inject

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message; larger columns go through the board."""
DEFAULT_DEADLINE_SECONDS = 30.0
"""Deadline of unary calls without one."""
DEFAULT_STREAM_DEADLINE_SECONDS = 330.0
"""Deadline of streaming calls without one."""


def channel(
    address: str,
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    term: int = 0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """Open a channel for coroutines.

    Args:
        address: host:port, or any gRPC target; with several addresses behind a name, calls go round-robin.
        token: bearer token; by default from the environment (see read_token).
        tls: TLS files; by default from the environment (see TlsFiles).
        term: the term that every call carries, as those of a coordinator do; 0: none.
        max_message_bytes: largest message.

    Calls without a timeout get a default deadline; the current span, if recorded, travels as `traceparent`.

    Raises ValueError for invalid TLS files, OSError or ValueError for an invalid token in the environment.
    """
    plain = open_channel(
        grpc.aio, address, channel_options(max_message_bytes), TlsFiles.from_environment() if tls is None else tls
    )
    return AsyncChannel(plain, call_metadata(token, term))


def sync_channel(
    address: str,
    *,
    token: str | None = None,
    tls: TlsFiles | None = None,
    term: int = 0,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Channel:
    """Open a channel for threads and the command line; otherwise like `channel`."""
    plain = open_channel(
        grpc, address, channel_options(max_message_bytes), TlsFiles.from_environment() if tls is None else tls
    )
    return _SyncChannel(plain, call_metadata(token, term))


def channel_options(max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Return the gRPC channel arguments of relaxd's clients."""
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


def call_metadata(token: str | None, term: int = 0) -> Callable[[Any], list[tuple[str, Any]] | None]:
    """Return a function that adds the token, the term and the current trace context to a call's metadata."""
    token = token or read_token()
    fixed = [("authorization", f"Bearer {token}")] if token else []
    fixed += [(TERM_METADATA, str(term))] if term else []

    def metadata(given: Any) -> list[tuple[str, Any]] | None:
        # The usual case has no span, token, term or metadata, and builds nothing.
        if trace.get_current_span().is_recording():
            return [*(given or ()), *fixed, *inject().items()]
        return [*(given or ()), *fixed] if given or fixed else None

    return metadata


class _Call:
    """A multi-callable that fills in what the caller left out."""

    def __init__(self, call: Any, deadline_seconds: float, metadata: Callable[[Any], Any]) -> None:
        self._call, self._deadline_seconds, self._metadata = call, deadline_seconds, metadata

    def __call__(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        timeout = self._deadline_seconds if timeout is None else timeout
        return self._call(request, timeout=timeout, metadata=self._metadata(metadata), **options)


class _SyncCall(_Call):
    def with_call(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        timeout = self._deadline_seconds if timeout is None else timeout
        return self._call.with_call(request, timeout=timeout, metadata=self._metadata(metadata), **options)

    def future(self, request: Any, timeout: float | None = None, metadata: Any = None, **options: Any) -> Any:
        timeout = self._deadline_seconds if timeout is None else timeout
        return self._call.future(request, timeout=timeout, metadata=self._metadata(metadata), **options)


# gRPC's own client interceptors would do, but cost every call a task and a call object of its own.


class AsyncChannel(grpc.aio.Channel):
    """A channel whose calls carry metadata and have a deadline."""

    def __init__(self, plain: grpc.aio.Channel, metadata: Callable[[Any], Any]) -> None:
        self._plain, self._metadata = plain, metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Call(self._plain.unary_unary(*arguments, **options), DEFAULT_DEADLINE_SECONDS, self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Call(self._plain.unary_stream(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Call(self._plain.stream_unary(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Call(self._plain.stream_stream(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata)

    async def __aenter__(self) -> "AsyncChannel":
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        await self._plain.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._plain.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._plain.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._plain.channel_ready()


class _SyncChannel(grpc.Channel):
    def __init__(self, plain: grpc.Channel, metadata: Callable[[Any], Any]) -> None:
        self._plain, self._metadata = plain, metadata

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return _SyncCall(self._plain.unary_unary(*arguments, **options), DEFAULT_DEADLINE_SECONDS, self._metadata)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _SyncCall(
            self._plain.unary_stream(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata
        )

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _SyncCall(
            self._plain.stream_unary(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata
        )

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _SyncCall(
            self._plain.stream_stream(*arguments, **options), DEFAULT_STREAM_DEADLINE_SECONDS, self._metadata
        )

    def subscribe(self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False) -> None:
        self._plain.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        self._plain.unsubscribe(callback)

    def close(self) -> None:
        self._plain.close()

    def __enter__(self) -> "_SyncChannel":
        return self

    def __exit__(self, *error: Any) -> bool | None:
        self.close()
        return None
