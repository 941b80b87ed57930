"""What the launcher would have the Docker engine create, from what the engine says of a container of Compose's."""

import copy
from typing import Any

from relaxd.v1 import launcher_pb2 as pb
from services.launcher.docker_host import container_config

LABELS = {
    "com.docker.compose.config-hash": "3f1c",
    "com.docker.compose.container-number": "1",
    "com.docker.compose.oneoff": "False",
    "com.docker.compose.project": "relaxd",
    "com.docker.compose.service": "rollout",
    "org.opencontainers.image.title": "relaxd rollout",
}
MOUNTS = [{"Type": "bind", "Source": "/srv/token", "Target": "/run/secrets/token", "ReadOnly": True}]
TEMPLATE: dict[str, Any] = {
    "Id": "d0a7f1",
    "Image": "sha256:5c0ffee",
    "Config": {
        "Hostname": "d0a7f1",
        "User": "relaxd",
        "Env": ["RELAXD_COORDINATOR=coordinator:50050", "PATH=/venv/bin:/usr/bin", "RELAXD_LAUNCH_ID="],
        "Cmd": None,
        "Entrypoint": ["python", "-m", "services.rollout"],
        "Image": "relaxd/rollout:dev",
        "Labels": LABELS,
        "StopSignal": "SIGTERM",
        "StopTimeout": 45,
        "Healthcheck": {"Test": ["CMD", "python", "-m", "relaxd.rpc.health_check"]},
    },
    "HostConfig": {
        "Binds": ["relaxd_models:/models:rw"],
        "Mounts": MOUNTS,
        "NetworkMode": "relaxd_relaxd",
        "PortBindings": {"50051/tcp": [{"HostIp": "127.0.0.1", "HostPort": "50051"}]},
        "RestartPolicy": {"Name": "unless-stopped", "MaximumRetryCount": 0},
        "CapDrop": ["ALL"],
        "Memory": 6 * 2**30,
        "DeviceRequests": None,
    },
    "NetworkSettings": {"Networks": {"relaxd_relaxd": {"Aliases": ["rollout", "d0a7f1"], "IPAddress": "172.20.0.5"}}},
}

REQUEST = pb.LaunchRequest(launch_id="rollout-more-1", role="rollout")


def test_it_is_the_template_under_a_name_of_its_own() -> None:
    before = copy.deepcopy(TEMPLATE)
    made = container_config(TEMPLATE, REQUEST, 3)
    assert before == TEMPLATE
    # The image by digest, command, user, mounts, secrets, limits and health check are the template's.
    assert made["Image"] == "sha256:5c0ffee"
    for key in ("User", "Cmd", "Entrypoint", "StopSignal", "StopTimeout", "Healthcheck"):
        assert made[key] == TEMPLATE["Config"][key]
    for key in ("Binds", "Mounts", "NetworkMode", "CapDrop", "Memory", "DeviceRequests"):
        assert made["HostConfig"][key] == TEMPLATE["HostConfig"][key]
    assert made["Env"] == [*TEMPLATE["Config"]["Env"][:2], "RELAXD_LAUNCH_ID=rollout-more-1"]
    # In the network without the template's aliases and address, and with no port of the host.
    assert made["NetworkingConfig"] == {"EndpointsConfig": {"relaxd_relaxd": {}}}
    assert made["HostConfig"]["PortBindings"] == {}
    assert "Hostname" not in made
    assert made["HostConfig"]["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 5}


def test_compose_sees_an_orphan_of_its_project() -> None:
    labels = container_config(TEMPLATE, REQUEST, 3)["Labels"]
    changed = {key: value for key, value in labels.items() if LABELS.get(key) != value}
    assert changed == {
        "com.docker.compose.service": "rollout-scaled",
        "com.docker.compose.container-number": "3",
        "relaxd.launch-id": "rollout-more-1",
        "relaxd.role": "rollout",
    }
    # Compose sees only containers with this label.
    assert labels["com.docker.compose.config-hash"] == "3f1c"


def test_gpus_by_uuid() -> None:
    request = pb.LaunchRequest(launch_id="rollout-more-1", role="rollout", gpu_uuids=["GPU-a", "GPU-b"])
    made = container_config(TEMPLATE, request, 1)
    assert made["HostConfig"]["DeviceRequests"] == [
        {"Driver": "nvidia", "DeviceIDs": ["GPU-a", "GPU-b"], "Capabilities": [["gpu"]]}
    ]


def test_an_sglang_server_by_url_instead_of_the_template_s() -> None:
    template = copy.deepcopy(TEMPLATE)
    template["Config"]["Env"].append("RELAXD_SGLANG_URL=http://old:30000")
    request = pb.LaunchRequest(launch_id="sglang-gpu-1-30000", role="rollout", sglang_url="http://gpu-1:30000")
    assert [line for line in container_config(template, request, 1)["Env"] if "SGLANG" in line] == [
        "RELAXD_SGLANG_URL=http://gpu-1:30000"
    ]
    assert "RELAXD_SGLANG_URL=http://old:30000" in container_config(template, REQUEST, 1)["Env"]
