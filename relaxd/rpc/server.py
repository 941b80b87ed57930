"""gRPC servers with health, reflection, deadlines, authentication, errors, tracing and limits."""

import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio  # type: ignore[attr-defined]

from relaxd.rpc.access import enable_reflection
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.credentials import ServerSecurity
from relaxd.rpc.errors import ServerError
from relaxd.rpc.interceptor import DEFAULT_DEADLINE_SECONDS, DEFAULT_STREAM_DEADLINE_SECONDS, CallInterceptor
from relaxd.rpc.leader_term import Fence
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.rpc.tls import server_credentials

LIVENESS = "liveness"
"""Name in the health service that is SERVING as long as the server answers, even while it starts or drains. Liveness
probes ask for it, such as Kubernetes', which kill a process that doesn't answer."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service(NamedTuple):
    """A gRPC service that a server offers. A plain tuple of the same values works, too."""

    add: Callable[[Any, Any], None]
    """The function that protoc generates to add the service to a server: add_<Name>Servicer_to_server."""
    servicer: Any
    """Implementation of the service; handlers are coroutines or asynchronous generators."""
    name: str
    """The gRPC service's full name, such as "relaxd.v1.Reward"."""


class RunningServer:
    """A started gRPC server. Its health status is NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self, server: grpc.aio.Server, host: str, port: int, health: health_aio.HealthServicer, names: Sequence[str]
    ) -> None:
        self.server = server
        self.host = host
        self.port = port
        self._health = health
        self._names = names
        self.serving = False

    async def set_serving(self, serving: bool) -> None:
        """Set the health status of all services and of the server as a whole (the empty name)."""
        self.serving = serving
        for name in ("", *self._names):
            await self._health.set(name, _SERVING if serving else _NOT_SERVING)

    async def stop(self, grace_seconds: float = 0.0) -> None:
        """Stop accepting calls, and cancel running ones after grace_seconds."""
        await self.set_serving(False)
        await self.server.stop(grace_seconds)


async def start_server(
    services: Sequence[tuple[Callable[[Any, Any], None], Any, str]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    security: ServerSecurity | None = None,
    fence: Fence | None = None,
    stack: str = "",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    stream_deadline_seconds: float = DEFAULT_STREAM_DEADLINE_SECONDS,
    max_connection_age_seconds: float | None = None,
    serving: bool = False,
) -> RunningServer:
    """Start a grpc.aio server with health, reflection and our interceptor.

    Args:
        services: (add_<Name>Servicer_to_server, servicer, full service name) of each service.
        host: address to listen on.
        port: port to listen on; 0 picks a free one (see RunningServer.port).
        security: tokens and TLS; None accepts all calls, on loopback only. Health checks need no token.
        fence: refuses calls of coordinators that were replaced; None obeys every caller.
        stack: identity of the server's stack, whose calls it accepts; empty accepts those of all stacks.
        max_message_bytes: maximum size of a message; larger ones fail with RESOURCE_EXHAUSTED.
        deadline_seconds: default deadline of unary calls, at which the handler is cancelled.
        stream_deadline_seconds: the same for streaming calls.
        max_connection_age_seconds: age at which clients should reconnect, so that those that balance over the
            replicas behind one name find new ones; None: never. Calls in progress stay on the old connection until
            they end.
        serving: set health to SERVING at once.

    Raises ServerError if the port is taken, the address is not available, or `security` is too weak for it.
    """
    security, age = security or ServerSecurity(), max_connection_age_seconds
    security.check(host)
    server = grpc.aio.server(
        interceptors=[
            CallInterceptor(
                tokens=security.tokens,
                fence=fence,
                stack=stack,
                deadline_seconds=deadline_seconds,
                stream_deadline_seconds=stream_deadline_seconds,
            )
        ],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", max_message_bytes),
            # Otherwise two servers on one port would silently share its connections at random.
            ("grpc.so_reuseport", 0),
            *(() if age is None else (("grpc.max_connection_age_ms", int(age * 1000)),)),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ],
    )
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = []
    for add, servicer, name in services:
        add(servicer, server)
        names.append(name)
    enable_reflection(server, [*names, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name])
    try:
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if security.tls.certificate:
            bound = server.add_secure_port(address, server_credentials(security.tls))
        else:
            bound = server.add_insecure_port(address)
    except ValueError as error:
        raise ServerError(str(error)) from error
    except RuntimeError as error:
        raise ServerError(_bind_problem(host, port)) from error
    await server.start()
    running = RunningServer(server, host, bound, health, names)
    await health.set(LIVENESS, _SERVING)
    await running.set_serving(serving)
    return running


async def start_service(
    services: Sequence[tuple[Callable[[Any, Any], None], Any, str]],
    settings: ServiceSettings,
    *,
    fence: Fence | None = None,
    serving: bool = False,
    max_connection_age_seconds: float | None = None,
) -> RunningServer:
    """Start a service process's gRPC server as its settings say; otherwise like `start_server`."""
    return await start_server(
        services,
        host=settings.host,
        port=settings.port,
        security=settings.security,
        fence=fence,
        stack=settings.stack,
        max_message_bytes=settings.max_message_bytes,
        deadline_seconds=settings.deadline_seconds,
        stream_deadline_seconds=settings.stream_deadline_seconds,
        max_connection_age_seconds=max_connection_age_seconds,
        serving=serving,
    )


def _bind_problem(host: str, port: int) -> str:
    """Return why the server can't listen at host:port. Tries to bind again, because gRPC doesn't report the reason."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} on {host} is taken: stop the process that uses it, or set another --port / RELAXD_PORT"
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        return f"cannot listen on port {port} of {host}: {reason} (--host / RELAXD_HOST, --port / RELAXD_PORT)"
    return f"port {port} on {host} was taken a moment ago but is free now: try again"
