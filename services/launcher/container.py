"""The configuration of a launched container: a copy of one that Compose started, under its own name."""

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
"""Appended to the compose service of a launched container. No compose file has that service, so the container is an
orphan: `docker compose up --scale`, which knows nothing of scale requests, ignores it, and `down --remove-orphans`
removes it."""
MAX_RESTARTS = 5
"""Maximum restarts of a container that fails."""
NOT_COPIED = ("Hostname", "Image", "Labels", "Env")
"""Keys of a container's configuration that are not copied as they are."""


def container_config(
    template: Mapping[str, Any], launch_id: str, role: str, gpu_uuids: Sequence[str], number: int
) -> dict[str, Any]:
    """Return the body of the Docker engine's call that creates a container.

    Args:
        template: the engine's `inspect` of a container that Compose started for the role's service. Image, command,
            user, mounts, secrets, limits and networks are copied from it.
        launch_id: launch id that the replica registers with.
        role: role of the replica.
        gpu_uuids: GPUs that it sees; empty: those of the template.
        number: number among the role's launched containers, from 1 on.
    """
    original = template["Config"]
    config = {key: copy.deepcopy(value) for key, value in original.items() if key not in NOT_COPIED}
    config["Image"] = template["Image"]  # the digest: the name may refer to another image by now
    environment = [
        line for line in original.get("Env") or () if not line.startswith(("RELAXD_LAUNCH_ID=", "HOSTNAME="))
    ]
    config["Env"] = [*environment, f"RELAXD_LAUNCH_ID={launch_id}"]
    labels = dict(original["Labels"])
    labels |= {SERVICE: labels[SERVICE] + SUFFIX, NUMBER: str(number), ONEOFF: "False"}
    config["Labels"] = labels | {LAUNCH_ID: launch_id, ROLE: role}
    host = copy.deepcopy(dict(template["HostConfig"]))
    host["PortBindings"] = {}  # only one container can bind a host port
    host["RestartPolicy"] = {"Name": "on-failure", "MaximumRetryCount": MAX_RESTARTS}
    if gpu_uuids:
        host["DeviceRequests"] = [{"Driver": "nvidia", "DeviceIDs": list(gpu_uuids), "Capabilities": [["gpu"]]}]
    config["HostConfig"] = host
    networks = template["NetworkSettings"]["Networks"]
    config["NetworkingConfig"] = {"EndpointsConfig": {name: {} for name in networks}}
    return config
