"""A host that runs replicas as containers, through the Docker engine. Each container is a copy of one that Compose
started."""

import copy
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import docker
import docker.errors
import requests

from relaxd.roles import REPLICA_ROLES, SCALABLE_ROLES
from relaxd.rpc.errors import FailedPrecondition, NotFound, Unavailable
from relaxd.rpc.service_settings import container_id
from relaxd.v1 import launcher_pb2 as pb

logger = logging.getLogger(__name__)

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONEOFF = "com.docker.compose.oneoff"
LAUNCH_ID = "relaxd.launch-id"
ROLE = "relaxd.role"
SUFFIX = "-scaled"
"""Suffix of a launched container's compose service. No compose file has that service, so the container is an
orphan: `docker compose up --scale`, which knows nothing of scale requests, ignores it, and `down --remove-orphans`
removes it."""
MAX_RESTARTS = 5
"""Maximum number of times that the Docker engine restarts a container that fails."""
NOT_COPIED = ("Hostname", "Image", "Labels", "Env")
"""Keys of the template container's configuration that a copy omits or changes."""


def container_config(template: Mapping[str, Any], request: pb.LaunchRequest, number: int) -> dict[str, Any]:
    """Return the body of the Docker engine's call that creates a container.

    Args:
        template: the engine's `inspect` of a container that Compose started for the role's service. Image, command,
            user, mounts, secrets, limits and networks are copied from it.
        request: launch id, role, GPUs and SGLang server of the replica; without GPUs or server, the template's are
            used.
        number: number among the role's launched containers, from 1 on.
    """
    original = template["Config"]
    config = {key: copy.deepcopy(value) for key, value in original.items() if key not in NOT_COPIED}
    config["Image"] = template["Image"]  # the digest: the name may refer to another image by now
    given = {"RELAXD_LAUNCH_ID": request.launch_id}
    if request.sglang_url:
        given["RELAXD_SGLANG_URL"] = request.sglang_url
    left_out = {"HOSTNAME", *given}
    environment = [line for line in original.get("Env") or () if line.partition("=")[0] not in left_out]
    config["Env"] = environment + [f"{name}={value}" for name, value in given.items()]
    labels = dict(original["Labels"])
    labels |= {SERVICE: labels[SERVICE] + SUFFIX, NUMBER: str(number), ONEOFF: "False"}
    config["Labels"] = labels | {LAUNCH_ID: request.launch_id, ROLE: request.role}
    host = copy.deepcopy(dict(template["HostConfig"]))
    host["PortBindings"] = {}  # only one container can bind a host port
    host["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": MAX_RESTARTS}
    if request.gpu_uuids:
        host["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": list(request.gpu_uuids), "Capabilities": [["gpu"]]}]
    config["HostConfig"] = host
    networks = template["NetworkSettings"]["Networks"]
    config["NetworkingConfig"] = {"EndpointsConfig": {name: {} for name in networks}}
    return config


ENGINE_SECONDS = 30.0
"""Timeout of a call to the Docker engine, in seconds."""
STATES = {
    "created": pb.INSTANCE_STATE_RUNNING,
    "running": pb.INSTANCE_STATE_RUNNING,
    "paused": pb.INSTANCE_STATE_RUNNING,
    "restarting": pb.INSTANCE_STATE_RESTARTING,
}


class DockerHost:
    """Runs replicas as containers of one compose project: copies containers of its services, and removes the copies."""

    roles = frozenset(SCALABLE_ROLES)

    def __init__(self, project: str = "") -> None:
        """Connect to the Docker engine. `project`: name of the compose project; if empty, that of this process's
        container.

        Raises Unavailable when no engine answers, FailedPrecondition when this process runs in no project's container.
        """
        self._launching = threading.Lock()
        self._numbers: dict[str, int] = {}
        """Highest number of a launched container, by role."""
        with _translate_errors():
            self._engine = docker.from_env(timeout=ENGINE_SECONDS).api
            self.project = project or self._own_project()

    def launch(self, request: pb.LaunchRequest) -> pb.Instance:
        launch_id, role = request.launch_id, request.role
        with _translate_errors(), self._launching:
            found = self._launched(launch_id)
            if not found:
                config = container_config(self._template(role), request, self._next_number(role))
                made = self._engine.create_container_from_config(config, name=f"{self.project}-{launch_id}")
                for warning in made.get("Warnings") or ():
                    logger.warning("%s: %s", launch_id, warning)
                found = self._launched(launch_id)
            if found[0]["State"] == "created":
                self._engine.start(found[0]["Id"])
            return _instance(self._launched(launch_id)[0])

    def remove(self, launch_id: str, grace_seconds: float) -> None:
        with _translate_errors():
            for container in self._launched(launch_id):
                try:
                    self._engine.stop(container["Id"], timeout=math.ceil(grace_seconds))
                    self._engine.remove_container(container["Id"], v=True, force=True)
                except docker.errors.NotFound:
                    logger.info("%s was removed already", launch_id)

    def restart(self, instance: str, replica_id: str) -> str:
        """Restart a container, given by its id as `instance`. `replica_id` is ignored: the engine doesn't know it."""
        with _translate_errors():
            container = next((one for one in self._containers() if one["Id"].startswith(instance)), None)
            if container is None:
                raise NotFound(f"project {self.project!r} has no container {instance!r}")
            role = container["Labels"].get(ROLE) or container["Labels"][SERVICE]
            if role not in REPLICA_ROLES:
                raise FailedPrecondition(
                    f"container {instance} is of service {role}: only {', '.join(REPLICA_ROLES)} can be restarted"
                )
            if container["State"] == "paused":  # the engine does not stop a paused container
                self._engine.unpause(container["Id"])
            self._engine.restart(container["Id"], timeout=0)
            return f"container {container['Names'][0].removeprefix('/')} was {container['State']}"

    def instances(self) -> list[pb.Instance]:
        with _translate_errors():
            return [_instance(container) for container in self._launched()]

    def _template(self, role: str) -> dict[str, Any]:
        """Return the container from which new ones of a role's service are copied: the oldest that is running, or if
        none is, the oldest stopped one."""
        containers = self._containers(f"{SERVICE}={role}", f"{ONEOFF}=False")
        if not containers:
            raise FailedPrecondition(
                f"project {self.project!r} has no container of service {role!r} to copy; start one first: "
                f"docker compose up -d {role}"
            )
        oldest = min(containers, key=lambda one: (one["State"] != "running", int(one["Labels"][NUMBER])))
        inspected: dict[str, Any] = self._engine.inspect_container(oldest["Id"])
        return inspected

    def _next_number(self, role: str) -> int:
        """Return a number for a new container that no other launched container of the role has. Only the first call
        lists the containers."""
        if not self._numbers:
            for one in self._launched():
                number, of_role = int(one["Labels"][NUMBER]), one["Labels"][ROLE]
                self._numbers[of_role] = max(number, self._numbers.get(of_role, 0))
        self._numbers[role] = self._numbers.get(role, 0) + 1
        return self._numbers[role]

    def _launched(self, launch_id: str = "") -> list[dict[str, Any]]:
        return self._containers(f"{LAUNCH_ID}={launch_id}" if launch_id else LAUNCH_ID)

    def _containers(self, *labels: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._engine.containers(
            all=True, filters={"label": [f"{PROJECT}={self.project}", *labels]}
        )
        return found

    def _own_project(self) -> str:
        labels: dict[str, str] = {}
        if own := container_id():
            with suppress(docker.errors.NotFound):  # a container of another engine
                labels = self._engine.inspect_container(own)["Config"]["Labels"]
        if PROJECT not in labels:
            raise FailedPrecondition(
                "this process does not run in a container of a compose project: name the project with --project / "
                "RELAXD_PROJECT"
            )
        return labels[PROJECT]


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn the Docker engine's errors into RpcErrors."""
    try:
        yield
    except docker.errors.APIError as error:
        refusal = FailedPrecondition if error.is_client_error() else Unavailable
        raise refusal(f"the Docker engine refuses: {error.explanation or error}") from error
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise Unavailable(f"the Docker engine does not answer: {error}") from error


def _instance(container: dict[str, Any]) -> pb.Instance:
    state = STATES.get(container["State"], pb.INSTANCE_STATE_FAILED)
    name, status = container["Names"][0].removeprefix("/"), container["Status"]
    return pb.Instance(
        launch_id=container["Labels"][LAUNCH_ID],
        role=container["Labels"][ROLE],
        state=state,
        detail=f"container {name}: {status[:1].lower()}{status[1:]}" + _hint(name, state),
    )


def _hint(name: str, state: "pb.InstanceState.ValueType") -> str:
    return "" if state == pb.INSTANCE_STATE_RUNNING else f" (docker logs {name})"
