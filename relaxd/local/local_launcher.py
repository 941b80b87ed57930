"""The launcher of local replicas: `python -m relaxd.local.local_launcher STATE_FOLDER`, started by the supervisor.

It starts no process itself, because gRPC and forking don't mix and all services must end together. It writes its
requests into the state folder, and the supervisor, the parent of all services, carries them out.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from relaxd.local.state_folder import LaunchWish, LaunchWishes, RestartWish, ServiceState, StateFolder
from relaxd.local.supervisor import StackPlan
from relaxd.replica.launcher_server import run_launcher
from relaxd.roles import REPLICA_ROLES
from relaxd.rpc.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from relaxd.rpc.service_settings import parse_settings
from relaxd.v1 import launcher_pb2 as pb

LOOK_SECONDS = 0.05
LAUNCH_SECONDS = 10.0
"""Maximum seconds for the supervisor to execute a request of the launcher."""


class LocalHost:
    """Launches replicas on this machine by requests to the stack's supervisor. Implements `Host`."""

    def __init__(self, folder: StateFolder) -> None:
        plan = StackPlan.model_validate_json(folder.plan.read_bytes())
        self.roles = frozenset(plan.templates)
        self._reserved = {spec.name for spec in plan.services}
        self._folder = folder
        self._writing = threading.Lock()

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        launch_id = request.launch_id
        if launch_id in self._reserved:
            raise FailedPrecondition(f"{launch_id!r} is the name of a service that `relaxd up` started")
        with self._writing:
            wishes = self._folder.read_launched()
            if launch_id not in wishes.wishes:
                wishes.wishes[launch_id] = LaunchWish(
                    role=request.role, gpu_uuids=list(request.gpu_uuids), sglang_url=request.sglang_url
                )
                self._folder.write_launched(wishes)
            elif wishes.wishes[launch_id].stop_seconds is not None:
                raise FailedPrecondition(f"{launch_id!r} is being removed")
        self._wait_until(lambda: launch_id in self._services(), LAUNCH_SECONDS, f"start {launch_id}")
        return self._instance(launch_id, request.role, self._services().get(launch_id))

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        with self._writing:
            wishes = self._folder.read_launched()
            wish = wishes.wishes.get(launch_id)
            if wish is None:
                return
            if wish.stop_seconds is None:
                wishes.wishes[launch_id] = wish.model_copy(update={"stop_seconds": grace_seconds})
                self._folder.write_launched(wishes)
        seconds = grace_seconds + LAUNCH_SECONDS
        self._wait_until(lambda: launch_id not in self._services(), seconds, f"stop {launch_id}")
        with self._writing:
            wishes = self._folder.read_launched()
            wishes.wishes.pop(launch_id, None)
            wishes.restarts.pop(launch_id, None)
            self._folder.write_launched(wishes)

    def restart(self, instance: str, replica_id: str) -> str:
        def found() -> ServiceState | None:
            return next((service for service in self._all_services() if service.name == instance), None)

        service = found()
        if service is None:
            raise NotFound(f"the supervisor of {self._folder.path} has no {instance!r}")
        if service.role not in REPLICA_ROLES:
            raise FailedPrecondition(
                f"{instance} has role {service.role}; only {', '.join(REPLICA_ROLES)} can be restarted this way"
            )
        with self._writing:
            wishes = self._folder.read_launched()
            before = wishes.restarts.get(instance)
            number = 1 + (before.number if before else 0)
            wishes.restarts[instance] = RestartWish(number=number, replica_id=replica_id)
            self._folder.write_launched(wishes)

        def followed() -> bool:
            now = found()
            return now is None or now.restart_wish >= number

        self._wait_until(followed, LAUNCH_SECONDS, f"restart {instance}")
        return f"{instance} was {service.phase}" + (f", process {service.pid}" if service.pid else "")

    def instances(self) -> list[pb.Instance]:
        wanted: LaunchWishes = self._folder.read_launched()
        services = self._services()
        return [self._instance(name, wish.role, services.get(name)) for name, wish in wanted.wishes.items()]

    def _instance(self, launch_id: str, role: str, service: ServiceState | None) -> pb.Instance:
        if service is None or service.phase in ("starting", "running"):
            pid = f"process {service.pid}" if service else "starting"
            return pb.Instance(launch_id=launch_id, role=role, state=pb.INSTANCE_STATE_RUNNING, detail=pid)
        state = pb.INSTANCE_STATE_RESTARTING if service.phase == "restarting" else pb.INSTANCE_STATE_FAILED
        last = "".join(self._folder.log_tail(launch_id, 1)).strip()
        reason = f": {last[-300:]}" if last else ""
        detail = f"exited with code {service.exit_code}{reason} (see {self._folder.log(launch_id)})"
        return pb.Instance(launch_id=launch_id, role=role, state=state, detail=detail)

    def _services(self) -> dict[str, ServiceState]:
        return {service.name: service for service in self._all_services() if service.launched}

    def _all_services(self) -> list[ServiceState]:
        state = self._folder.read()
        if state is None:
            raise Unavailable(f"no supervisor runs in {self._folder.path}")
        return state.services

    def _wait_until(self, condition: Callable[[], bool], seconds: float, request: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise DeadlineExceeded(f"the supervisor did not {request} within {seconds:g} s")
            time.sleep(LOOK_SECONDS)  # brief: the request's seconds


def main() -> None:
    """Run the launcher of the state folder that the command line names."""
    settings = parse_settings("launcher", sys.argv[2:])
    asyncio.run(run_launcher(LocalHost(StateFolder(Path(sys.argv[1]))), settings))


if __name__ == "__main__":
    main()
