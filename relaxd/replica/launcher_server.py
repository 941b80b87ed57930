"""Server of relaxd.v1.Launcher. The server's Host starts local processes (relaxd.local.local_launcher), containers or
pods (services.launcher).

A replaced coordinator must not start or kill anything any more, so the launcher reads the newest term from Redis at
every call and refuses calls with another term. It remembers no term itself: a single mistyped or malicious call with a
large term would lock the coordinator out, a restarted launcher would have forgotten it, and a term on disk would refuse
the coordinators of a Redis that started empty.
"""

import asyncio
import logging
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from relaxd import telemetry
from relaxd.process.upkeep import stop_signals
from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import ServerError, Violations
from relaxd.rpc.leader_term import RedisTerm
from relaxd.rpc.message_parts import SGLANG_URL, SGLANG_URL_RULE, Page, check_gpu_uuids
from relaxd.rpc.server import Service, start_service
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import launcher_pb2 as pb
from relaxd.v1 import launcher_pb2_grpc


class Host(Protocol):
    """Starts and stops replicas, as processes, containers or pods. The methods may block and raise RpcError. Several
    threads call them at the same time."""

    roles: frozenset[str]
    """Roles that the host can start."""

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        """Start a replica, or return the existing replica with the request's launch id."""

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        """Stop a launched replica, and return once it has ended."""

    def restart(self, instance: str, replica_id: str) -> str:
        """Kill a replica's process and start it again (see launcher.proto). Returns a description of the steps
        taken."""

    def instances(self) -> list[pb.Instance]:
        """Return the replicas that were launched and not removed."""


LAUNCH_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
THREADS = 32
"""Number of threads for the host's calls, which wait for processes to start and end."""
MAX_GRACE_SECONDS = 600.0
_NAME_RULE = "must be 1 to 100 letters, digits, dots, dashes and underscores, the first one a letter or digit"

_log = logging.getLogger(__name__)


class LauncherServicer(launcher_pb2_grpc.LauncherServicer):
    """Implements the gRPC service relaxd.v1.Launcher: checks requests and passes them on to a host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def Launch(self, request: pb.LaunchRequest, context: Any) -> pb.LaunchResponse:
        violations = Violations()
        _check_launch_id(request.launch_id, violations)
        roles = ", ".join(sorted(self._host.roles))
        violations.check(request.role in self._host.roles, "role", f"is {request.role!r}: it must be one of {roles}")
        check_gpu_uuids("gpu_uuids", request.gpu_uuids, violations)
        url = request.sglang_url
        violations.check(not url or request.role == ROLLOUT, "sglang_url", f"must be empty for role {request.role!r}")
        violations.check(not url or SGLANG_URL.fullmatch(url), "sglang_url", f"is {url!r}: it {SGLANG_URL_RULE}")
        violations.raise_if_any()
        instance = await asyncio.to_thread(self._host.launch, request)
        _log.info("launched %s: %s", request.launch_id, instance.detail)
        return pb.LaunchResponse(instance=instance)

    async def Remove(self, request: pb.RemoveRequest, context: Any) -> pb.RemoveResponse:
        violations = Violations()
        _check_launch_id(request.launch_id, violations)
        in_range = 0 <= request.grace_seconds <= MAX_GRACE_SECONDS
        violations.check(in_range, "grace_seconds", f"must be 0 to {MAX_GRACE_SECONDS:g}")
        violations.raise_if_any()
        await asyncio.to_thread(self._host.remove, request.launch_id, request.grace_seconds)
        _log.info("removed %s", request.launch_id)
        return pb.RemoveResponse()

    async def Restart(self, request: pb.LauncherRestartRequest, context: Any) -> pb.LauncherRestartResponse:
        violations = Violations()
        violations.check(LAUNCH_ID.fullmatch(request.instance), "instance", _NAME_RULE)
        violations.check(len(request.replica_id) <= 128, "replica_id", "must be a replica's id, or empty")
        violations.raise_if_any()
        detail = await asyncio.to_thread(self._host.restart, request.instance, request.replica_id)
        _log.info("restarted %s: %s", request.instance, detail)
        return pb.LauncherRestartResponse(detail=detail)

    async def ListInstances(self, request: pb.ListInstancesRequest, context: Any) -> pb.ListInstancesResponse:
        page = Page[pb.Instance](request, f"instances {request.launch_id}", default=100, maximum=1000)
        instances = await asyncio.to_thread(self._host.instances)
        for instance in sorted(instances, key=lambda instance: instance.launch_id):
            wanted = request.launch_id in ("", instance.launch_id) and instance.launch_id > page.after
            if wanted and not page.add(instance.launch_id, instance):
                break
        return pb.ListInstancesResponse(instances=page.items, next_page_token=page.next_page_token)


async def run_launcher(host: Host, settings: ServiceSettings) -> None:
    """Run a launcher's server until SIGTERM or SIGINT. Raises SystemExit(1), after logging the reason, when the port is
    taken."""
    telemetry.setup_logging(settings.replica_id, settings.log_level)
    telemetry.setup(settings.role, settings.replica_id)
    try:
        await _serve(host, settings)
    finally:
        await asyncio.to_thread(telemetry.shutdown)


async def _serve(host: Host, settings: ServiceSettings) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(THREADS, thread_name_prefix="host"))
    stop = stop_signals()
    servicer = LauncherServicer(host)
    service = Service(launcher_pb2_grpc.add_LauncherServicer_to_server, servicer, "relaxd.v1.Launcher")
    try:
        server = await start_service([service], settings, fence=RedisTerm(settings.redis), serving=True)
    except ServerError as error:
        _log.error("%s", error)
        raise SystemExit(1) from None
    _log.info("listening on %s:%d, for %s", settings.host, server.port, ", ".join(sorted(host.roles)))
    await stop.wait()
    await server.stop(1.0)


def _check_launch_id(launch_id: str, violations: Violations) -> None:
    violations.check(LAUNCH_ID.fullmatch(launch_id), "launch_id", _NAME_RULE)
