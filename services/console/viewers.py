"""Viewers of the page, and their rights.

Where the coordinator asks for tokens, a viewer gives one, and the console makes the viewer's calls with it: a viewer
may see and do what the coordinator allows this token. The console's own token only follows runs, for all viewers.
"""

import secrets
import time
from dataclasses import dataclass, field

import grpc
from aiohttp import web

from relaxd.rpc.client import channel
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
    """A viewer, with the connection for calls to the coordinator on the viewer's behalf."""

    channel: grpc.aio.Channel
    csrf: str = field(default_factory=secrets.token_urlsafe)
    """Secret that the page sends with every request that changes something."""
    began: float = field(default_factory=time.monotonic)

    @property
    def stub(self) -> CoordinatorStub:
        """The coordinator, called with the viewer's token."""
        return CoordinatorStub(self.channel)

    async def may_act(self) -> bool:
        """Return True if the viewer's token is for calls that change something. Raises AioRpcError."""
        request = scaling_pb2.CancelScaleRequestsRequest(dry_run=True)  # the only one of them that changes nothing
        try:
            await self.stub.CancelScaleRequests(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                return False
            raise
        return True


class Viewers:
    """The viewers by their session cookies. If the console has no token, everybody is the same viewer."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._everybody = None if settings.token else Viewer(self._channel(None))
        self._sessions: dict[str, Viewer] = {}

    @property
    def log_in(self) -> bool:
        """True if viewers have to give a token."""
        return self._everybody is None

    def find(self, request: web.Request) -> Viewer | None:
        """Return the viewer of a request; None if a login is required."""
        if self._everybody is not None:
            return self._everybody
        viewer = self._sessions.get(request.cookies.get(COOKIE, ""))
        return viewer if viewer is not None and time.monotonic() - viewer.began < SESSION_SECONDS else None

    async def begin(self, token: str, response: web.Response) -> Viewer:
        """Begin a session and set its cookie on `response`. Raises AioRpcError if the coordinator refuses the token."""
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
        """End the session of a request."""
        if (viewer := self._sessions.pop(request.cookies.get(COOKIE, ""), None)) is not None:
            await viewer.channel.close(None)

    async def close(self) -> None:
        """End all sessions."""
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
