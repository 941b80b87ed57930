"""Guard of the HTTP server: it decides which requests are answered, and sets the answers' headers."""

import hmac
from collections.abc import Collection
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import grpc
from aiohttp import web
from aiohttp.typedefs import Handler

from relaxd.rpc.errors import explain, has_status
from services.console.viewers import Viewer, Viewers

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
CSRF_HEADER = "X-Relaxd-Csrf"
OPEN = frozenset({"/api/session", "/api/login"})
"""API addresses that need no session."""
VIEWER = web.RequestKey("viewer", Viewer)
"""Key of a request's viewer."""
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
"""HTTP statuses of the coordinator's refusals; any other one becomes BAD_GATEWAY."""
SILENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that gRPC itself returns for an unanswered call."""


class Refusal(Exception):
    """A request that the console refuses: the status, and a sentence for people."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def guard(viewers: Viewers, hosts: Collection[str]) -> Any:
    """Return the middleware. `hosts`: the server's host names in browsers, besides loopback's."""
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
    """Refuse other host names: another site's page could assign one to this server (DNS rebinding) and read the
    answers."""
    name = (urlsplit(f"//{request.host}").hostname or "").lower()
    if name not in allowed:
        raise Refusal(
            HTTPStatus.FORBIDDEN,
            f"this console doesn't answer as {name!r}: use {' or '.join(sorted(allowed))}, or add the name to "
            "RELAXD_CONSOLE_HOSTS",
        )


def _check_viewer(request: web.Request, viewers: Viewers) -> None:
    """Find the request's viewer, and refuse changes requested by another site's page."""
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
