"""Guard of the console: checks viewers' rights and requests, and sets the answers' headers.

If the coordinator requires tokens, each viewer logs in with a token, which the console uses for the viewer's calls: a
viewer may see and do what the coordinator allows for that token. The console uses its own token only to follow runs for
all viewers.
"""

import hmac
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import grpc
from aiohttp import web
from aiohttp.typedefs import Handler

from relaxd.rpc.client import channel
from relaxd.rpc.errors import explain, has_status
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import scaling_pb2
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

COOKIE = "relaxd-console"
SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 1000
CALL_SECONDS = 10.0


@dataclass
class Viewer:
    """A viewer of the console, with a connection to the coordinator for the viewer's calls."""

    channel: grpc.aio.Channel
    csrf: str = field(default_factory=secrets.token_urlsafe)
    """Secret against forged requests, which the page sends with every request that changes something."""
    began: float = field(default_factory=time.monotonic)

    @property
    def stub(self) -> CoordinatorStub:
        """Stub of the coordinator that calls with the viewer's token."""
        return CoordinatorStub(self.channel)

    async def may_act(self) -> bool:
        """Return True if the viewer's token permits calls that change something. Raises AioRpcError."""
        request = scaling_pb2.CancelScaleRequestsRequest(dry_run=True)  # the only one of them that changes nothing
        try:
            await self.stub.CancelScaleRequests(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                return False
            raise
        return True


class Viewers:
    """Keeps the viewers by session cookie. If the console has no token, everybody is the same viewer."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._everybody = None if settings.token else Viewer(self._channel(None))
        self._sessions: dict[str, Viewer] = {}

    @property
    def log_in(self) -> bool:
        """True if viewers have to log in with a token."""
        return self._everybody is None

    def find(self, request: web.Request) -> Viewer | None:
        """Return the viewer who sent a request; None if a login is required."""
        if self._everybody is not None:
            return self._everybody
        viewer = self._sessions.get(request.cookies.get(COOKIE, ""))
        return viewer if viewer is not None and time.monotonic() - viewer.began < SESSION_SECONDS else None

    async def begin(self, token: str, response: web.Response) -> Viewer:
        """Begin a viewer's session and set its cookie on `response`.

        Raises AioRpcError if the coordinator refuses the token.
        """
        viewer = Viewer(self._channel(token))
        try:
            await viewer.stub.ListRuns(pb.ListRunsRequest(page_size=1), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError:
            await viewer.channel.close(None)
            raise
        await self._end_old_ones()
        session = secrets.token_urlsafe()
        self._sessions[session] = viewer
        response.set_cookie(COOKIE, session, max_age=int(SESSION_SECONDS), httponly=True, samesite="Strict", path="/")
        return viewer

    async def end(self, request: web.Request) -> None:
        """End the session to which a request belongs."""
        if (viewer := self._sessions.pop(request.cookies.get(COOKIE, ""), None)) is not None:
            await viewer.channel.close(None)

    async def close(self) -> None:
        """End all viewers' sessions."""
        viewers = [*self._sessions.values(), *([self._everybody] if self._everybody else [])]
        self._sessions.clear()
        for viewer in viewers:
            await viewer.channel.close(None)

    async def _end_old_ones(self) -> None:
        now = time.monotonic()
        for session, viewer in list(self._sessions.items()):  # in the order of their beginnings
            if now - viewer.began < SESSION_SECONDS and len(self._sessions) < MAX_SESSIONS:
                return
            del self._sessions[session]
            await viewer.channel.close(None)

    def _channel(self, token: str | None) -> grpc.aio.Channel:
        settings = self._settings
        return channel(settings.coordinator, token=token, tls=settings.tls, stack=settings.stack)


LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
CSRF_HEADER = "X-Relaxd-Csrf"
OPEN = frozenset({"/api/session", "/api/login"})
"""API paths that need no session."""
VIEWER = web.RequestKey("viewer", Viewer)
"""Key under which the viewer is stored in a request."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "media-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.CONFLICT,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
"""HTTP status for each gRPC status with which the coordinator refuses a call; other statuses become BAD_GATEWAY."""
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that gRPC itself returns if a call isn't answered."""


class Refusal(Exception):
    """The console refuses a request. Has the HTTP status, and a sentence for people."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def guard(viewers: Viewers, hosts: Collection[str]) -> Any:
    """Return aiohttp middleware that checks a request's host and, for the API, its viewer. Errors are answered as JSON.

    `hosts`: host names under which browsers may open the console, besides those of loopback.
    """
    allowed = LOOPBACK_NAMES | {host.lower() for host in hosts}

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            _check_host(request, allowed)
            if request.path.startswith("/api/"):
                _check_viewer(request, viewers)
            response = await handler(request)
        except Refusal as refusal:
            response = web.json_response({"error": str(refusal)}, status=refusal.status)
        except grpc.aio.AioRpcError as error:
            status = STATUSES.get(error.code(), HTTPStatus.BAD_GATEWAY)
            silent = error.code() in SILENT and not has_status(error)
            text = "the coordinator does not answer" if silent else error.details() or explain(error)
            response = web.json_response({"error": text}, status=status)
        except web.HTTPException as error:
            response = web.json_response({"error": error.reason}, status=error.status)
        return response

    return check


def _check_host(request: web.Request, allowed: Collection[str]) -> None:
    """Refuse a request for an unknown host name.

    With DNS rebinding, another site's page could assign its name to this server and read the answers.
    """
    name = (urlsplit(f"//{request.host}").hostname or "").lower()
    if name not in allowed:
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            f"this console doesn't answer as {name!r}: use {' or '.join(sorted(allowed))}, or add the name to "
            "RELAXD_CONSOLE_HOSTS",
        )


def _check_viewer(request: web.Request, viewers: Viewers) -> None:
    """Add the viewer to the request. Refuse requests without a required login, and changes by another site's page."""
    viewer = viewers.find(request)
    if viewer is not None:
        request[VIEWER] = viewer
    if request.method not in ("GET", "HEAD"):
        origin = request.headers.get("Origin")
        if origin is not None and urlsplit(origin).netloc != request.host:
            raise Refusal(HTTPStatus.FORBIDDEN, f"a page of {origin} can't change anything here")
        if request.content_type != "application/json":
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the request must have Content-Type: application/json")
    if request.path in OPEN:
        return
    if viewer is None:
        raise Refusal(HTTPStatus.UNAUTHORIZED, "this console needs a token: log in")
    if request.method not in ("GET", "HEAD"):
        given = request.headers.get(CSRF_HEADER, "").encode(errors="replace")
        if not hmac.compare_digest(given, viewer.csrf.encode()):
            raise Refusal(HTTPStatus.FORBIDDEN, f"the header {CSRF_HEADER} is not this session's: load the page again")
