"""`python -m services.console`: the HTTP server of the console."""

import asyncio
import logging
import os
from pathlib import Path

import grpc
from aiohttp import web

from relaxd import telemetry
from relaxd.process.upkeep import stop_signals
from relaxd.report.report_files import ASSETS as REPORT_ASSETS
from relaxd.rpc.client import channel
from relaxd.rpc.credentials import is_loopback
from relaxd.rpc.errors import ServerError
from relaxd.rpc.service_settings import CONSOLE_PORTS, ServiceSettings, parse_settings
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from services.console.guard import HEADERS, VIEWER, Viewers, guard
from services.console.live_changes import LiveChanges
from services.console.pages import Pages

ASSETS = Path(__file__).with_name("assets")
CLOSE_SECONDS = 1.0
"""Maximum seconds to wait for open requests when the server ends."""
CLEANUP_SECONDS = 10.0
MAX_BODY = 64 << 10
CALL_SECONDS = 10.0
NICENESS = 5
"""Increase of this process's nice value, so that the console doesn't slow down the run's services."""

logger = logging.getLogger(__name__)


class ConsoleServer:
    """HTTP server of the console, with a connection to the coordinator. Lives in one event loop."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._channel = channel(settings.coordinator, token=settings.token, tls=settings.tls, stack=settings.stack)
        self._live = LiveChanges(CoordinatorStub(self._channel))
        self._viewers = Viewers(settings)
        self._runner: web.AppRunner | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self.url = ""
        """URL of the console's page; "" until the server runs."""

    async def start(self) -> None:
        """Start the HTTP server.

        Raises ServerError if the port is taken, or if others could reach the server without a token.
        """
        settings = self._settings
        settings.security.check(settings.host)
        hosts = [*settings.console_hosts, *([settings.host] if settings.host not in ("", "0.0.0.0", "::") else [])]
        app = web.Application(client_max_size=MAX_BODY, middlewares=[guard(self._viewers, hosts)])
        app.add_routes(Pages(self._viewers, settings.coordinator, settings.trace_url).routes())
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/healthz", self._alive),
                web.get("/api/runs/{run}/events", self._events),
                web.static("/assets/shared", REPORT_ASSETS),
                web.static("/assets", ASSETS),
            ]
        )
        app.on_response_prepare.append(_add_headers)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
        await self._runner.setup()
        port = await self._listen()
        host = "127.0.0.1" if settings.host in ("", "0.0.0.0") or is_loopback(settings.host) else settings.host
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        self._cleaning = asyncio.create_task(self._clean_up())

    async def _listen(self) -> int:
        """Listen on the given port, or on the first free port of CONSOLE_PORTS.

        Returns the port. Raises ServerError.
        """
        assert self._runner is not None
        asked = self._settings.port
        for port in (asked,) if asked else CONSOLE_PORTS:
            try:
                await web.TCPSite(self._runner, self._settings.host, port).start()
            except OSError as error:
                if asked:
                    raise ServerError(f"cannot listen on {self._settings.host}:{port}: {error.strerror}") from error
                continue
            if not asked and port != CONSOLE_PORTS[0]:
                logger.warning("port %d is taken: the console is on %d", CONSOLE_PORTS[0], port)
            return port
        raise ServerError(f"ports {CONSOLE_PORTS[0]} to {CONSOLE_PORTS[-1]} are taken: choose one with --port")

    async def close(self) -> None:
        """End the HTTP server, and close the connections to the coordinator."""
        if self._cleaning is not None:
            self._cleaning.cancel()
        await self._live.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await self._viewers.close()
        await self._channel.close(None)

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_SECONDS)  # idle: looks again
            await self._live.close_left_ones()

    async def _page(self, request: web.Request) -> web.FileResponse:
        return web.FileResponse(ASSETS / "index.html")

    async def _alive(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "serving"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send a run's events as server-sent events."""
        run_id = request.match_info["run"]
        try:
            await request[VIEWER].stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() != grpc.StatusCode.UNAVAILABLE:  # away: the events say so, and when it is back
                raise
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
        await response.prepare(request)
        async with self._live.follow(run_id) as events:
            async for topic, state in events:
                event = f"event: {topic}\ndata: {state}\n\n" if topic else ": still there\n\n"
                try:
                    await response.write(event.encode())
                except ConnectionError:  # the page was closed
                    break
        return response


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    response.headers.setdefault("Cache-Control", "no-cache" if request.path.startswith("/assets/") else "no-store")


async def main(settings: ServiceSettings) -> int:
    """Run the console until it is stopped. Returns the exit code."""
    telemetry.setup_logging(settings.replica_id, settings.log_level)
    os.nice(NICENESS)
    stop = stop_signals()
    server = ConsoleServer(settings)
    try:
        await server.start()
        logger.info("the console of the coordinator at %s is at %s", settings.coordinator, server.url)
        await stop.wait()
    except ServerError as error:
        logger.error("%s", error)
        return 1
    finally:
        await server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(parse_settings("console"))))
