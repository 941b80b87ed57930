"""What a launched container is like: one more of what Compose started, under a name of its own."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

PROJECT = "com.docker.compose.project"
SERVICE = "com.docker.compose.service"
NUMBER = "com.docker.compose.container-number"
ONEOFF = "com.docker.compose.oneoff"
LAUNCH_ID = "relaxd.launch-id"
ROLE = "relaxd.role"
SUFFIX = "-scaled"
"""A launched container belongs to the service of this suffix, which no compose file has. As an orphan, it is left alone
by `docker compose up --scale`, which knows nothing of scale requests, and removed by `down --remove-orphans`."""
RESTARTS = 5
"""How often a container that fails is started again."""
OWN = ("Hostname", "Image", "Labels", "Env")
"""Of a container's configuration: what is not taken over as it is."""


def container_config(
    template: Mapping[str, Any], launch_id: str, role: str, gpu_uuids: Sequence[str], number: int
) -> dict[str, Any]:
    """The body of the engine's call that creates a container.

    Args:
        template: what the engine says (`inspect`) of a container that Compose started for the role's service. Image,
            command, user, mounts, secrets, limits and networks are its own.
        launch_id: what the replica registers with.
        role: of the replica.
        gpu_uuids: the GPUs that it shall see; empty: those of the template.
        number: its number among the launched ones of the role, from 1 on.
    """
    told = template["Config"]
    config = {key: copy.deepcopy(value) for key, value in told.items() if key not in OWN}
    config["Image"] = template["Image"]  # by its digest: the name may mean another image by now
    environment = [line for line in told.get("Env") or () if not line.startswith(("RELAXD_LAUNCH_ID=", "HOSTNAME="))]
    config["Env"] = [*environment, f"RELAXD_LAUNCH_ID={launch_id}"]
    labels = dict(told["Labels"])
    labels |= {SERVICE: labels[SERVICE] + SUFFIX, NUMBER: str(number), ONEOFF: "False"}
    config["Labels"] = labels | {LAUNCH_ID: launch_id, ROLE: role}
    host = copy.deepcopy(dict(template["HostConfig"]))
    host["PortBindings"] = {}  # a port of the host can be had once
    host["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": RESTARTS}
    if gpu_uuids:
        host["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": list(gpu_uuids), "Capabilities": [["gpu"]]}]
    config["HostConfig"] = host
    networks = template["NetworkSettings"]["Networks"]
    config["NetworkingConfig"] = {"EndpointsConfig": {name: {} for name in networks}}
    return config
