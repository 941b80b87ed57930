"""The launcher of containers on a real engine: it copies what Compose started, and Compose can live with that."""

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.rpc.errors import FailedPrecondition, NotFound, Unavailable
from relaxd.v1 import launcher_pb2 as pb
from relaxd.v1.coordinator_pb2 import RUN_STATE_STOPPED
from relaxd.v1.scaling_pb2 import SCALE_STATE_ACTIVE, ScaleOutRequest
from services.launcher.docker_host import DockerHost
from tests.compose.stack import ROOT, Stack, docker, running
from tests.kit.waiting import wait_until

COMPOSE_FILE = """
services:
  rollout:
    image: ${BASE_IMAGE:-python:3.11-slim}
    init: true
    command: ["python3", "-c", "import os, sys, time; sys.exit(3) if os.path.exists('/flag/fail') else time.sleep(600)"]
    environment: {RELAXD_COORDINATOR: "coordinator:50050"}
    restart: unless-stopped
    stop_grace_period: 7s
    cap_drop: [ALL]
    volumes: ["${FLAG}:/flag:ro"]
    secrets: [token]
    deploy: {resources: {limits: {memory: 128m}}}
  trainer:  # as in compose.gpu.yaml
    image: ${BASE_IMAGE:-python:3.11-slim}
    init: true
    ipc: host
    pid: host
    uts: host
    command: ["python3", "-c", "import time; time.sleep(600)"]
    restart: unless-stopped
    volumes: ["${RELAXD}/rpc/container_id.py:/container_id.py:ro"]
secrets:
  token: {file: ./token}
"""


class Project:
    """A compose project with a rollout and a trainer "service", and nothing of relaxd in them but one file."""

    def __init__(self, folder: Path) -> None:
        self.name = f"relaxd-launcher-{secrets.token_hex(3)}"
        self.folder = folder
        (folder / "compose.yaml").write_text(COMPOSE_FILE)
        (folder / "token").write_text("secret")
        (folder / "flag").mkdir()

    def compose(self, *words: str) -> str:
        environment = os.environ | {"FLAG": str(self.folder / "flag"), "COMPOSE_PROJECT_NAME": self.name}
        environment["RELAXD"] = str(ROOT / "relaxd")
        done = subprocess.run(
            ["docker", "compose", *words],
            cwd=self.folder,
            env={k: v for k, v in environment.items() if k != "COMPOSE_FILE"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def containers(self) -> dict[str, dict[str, Any]]:
        """`docker inspect` by name."""
        ids = docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={self.name}").split()
        return {one["Name"].removeprefix("/"): one for one in json.loads(docker("inspect", *ids))} if ids else {}


@pytest.fixture
def project(engine: None, tmp_path: Path) -> Iterator[Project]:
    """A project that is up."""
    project = Project(tmp_path)
    project.compose("up", "--detach", "--wait")
    yield project
    project.compose("down", "--volumes", "--remove-orphans", "--timeout", "1")
    assert project.containers() == {}, "Compose left something of it behind"


@pytest.mark.timeout(600)
def test_it_copies_and_removes_what_compose_started(project: Project) -> None:
    host = DockerHost(project.name)
    assert host.instances() == []
    made = host.launch(pb.LaunchRequest(launch_id="rollout-more-1", role="rollout"))
    assert (made.state, made.role) == (pb.INSTANCE_STATE_RUNNING, "rollout")
    assert (
        host.launch(pb.LaunchRequest(launch_id="rollout-more-1", role="rollout")).launch_id == "rollout-more-1"
    )  # again is the same
    first, copied = f"{project.name}-rollout-1", f"{project.name}-rollout-more-1"
    others = {f"{project.name}-trainer-1"}
    containers = project.containers()
    assert containers.keys() == {first, copied} | others
    template, copy = containers[first], containers[copied]
    assert copy["Image"] == template["Image"]
    for key in ("Binds", "Mounts", "CapDrop", "Memory", "Init"):
        assert copy["HostConfig"][key] == template["HostConfig"][key]
    assert copy["Config"]["Cmd"] == template["Config"]["Cmd"]
    assert copy["Config"]["StopTimeout"] == 7
    assert "RELAXD_LAUNCH_ID=rollout-more-1" in copy["Config"]["Env"]
    assert copy["NetworkSettings"]["Networks"].keys() == template["NetworkSettings"]["Networks"].keys()
    assert docker("exec", copied, "cat", "/run/secrets/token") == "secret"

    # Compose leaves it alone, and would warn of it.
    project.compose("up", "--detach", "--scale", "rollout=2")
    assert project.containers().keys() == {first, copied, f"{project.name}-rollout-2"} | others

    host.remove("rollout-more-1", 0)
    host.remove("rollout-more-1", 0)
    assert host.instances() == []
    assert project.containers().keys() == {first, f"{project.name}-rollout-2"} | others
    host.launch(pb.LaunchRequest(launch_id="rollout-more-2", role="rollout"))  # left for `down --remove-orphans`

    with pytest.raises(FailedPrecondition, match="no container of service 'reward'"):
        host.launch(pb.LaunchRequest(launch_id="reward-1", role="reward"))


@pytest.mark.timeout(600)
def test_a_copy_that_keeps_failing_is_given_up(project: Project) -> None:
    host = DockerHost(project.name)
    (project.folder / "flag" / "fail").touch()
    host.launch(pb.LaunchRequest(launch_id="rollout-more-1", role="rollout"))

    def failed() -> bool:
        (instance,) = host.instances()
        return instance.state == pb.INSTANCE_STATE_FAILED and "exited (3)" in instance.detail

    wait_until(failed, "it is given up", 150)
    host.remove("rollout-more-1", 0)


@pytest.mark.timeout(600)
def test_a_container_that_hangs_is_restarted(project: Project) -> None:
    host = DockerHost(project.name)
    name = f"{project.name}-rollout-1"
    before = project.containers()[name]
    os.kill(before["State"]["Pid"], signal.SIGSTOP)
    assert "was running" in host.restart(before["Config"]["Hostname"], "")
    after = project.containers()[name]
    assert (after["Id"], after["State"]["Status"]) == (before["Id"], "running")
    assert after["State"]["Pid"] != before["State"]["Pid"]
    docker("pause", name)
    assert "was paused" in host.restart(before["Config"]["Hostname"], "")
    assert project.containers()[name]["State"]["Status"] == "running"
    with pytest.raises(NotFound, match="has no container"):
        host.restart("0123456789ab", "")


@pytest.mark.timeout(600)
def test_a_container_with_the_hosts_name_knows_its_id(project: Project) -> None:
    name = f"{project.name}-trainer-1"
    before = project.containers()[name]
    words = ("python3", "-c", "import socket, container_id; print(socket.gethostname(), container_id.container_id())")
    host, instance = project.compose("exec", "--no-TTY", "--workdir", "/", "trainer", *words).split()
    assert (host, instance) == (socket.gethostname(), before["Id"][:12])
    os.kill(before["State"]["Pid"], signal.SIGSTOP)
    assert "was running" in DockerHost(project.name).restart(instance, "")
    after = project.containers()[name]
    assert (after["Id"], after["State"]["Status"]) == (before["Id"], "running")
    assert after["State"]["Pid"] != before["State"]["Pid"]


def test_an_engine_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(Unavailable, match="the Docker engine does not answer"):
        DockerHost("project")


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_scaling_by_request(stack: Stack, tmp_path: Path) -> None:
    engine_socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    settings = {
        "COMPOSE_FILE": "compose.yaml:compose.scaling.yaml",
        "DOCKER_SOCKET": engine_socket,
        "DOCKER_GROUP": str(os.stat(engine_socket).st_gid),
    }
    docker("compose", "build", "launcher", timeout=600, environment=settings)
    with running(stack, settings), CoordinatorClient(stack.address) as coordinator:
        mounts = {one["Config"]["Labels"]["com.docker.compose.service"]: one["Mounts"] for one in stack.containers()}
        assert [s for s, ms in mounts.items() if any(m["Source"] == engine_socket for m in ms)] == ["launcher"]
        stack.compose("cp", str(tmp_path / "tiny"), "coordinator:/models/")
        words = ("run", "--rm", "--no-deps", "--no-TTY", "cli")
        config = (stack.examples / "tiny.toml").read_text().replace("steps = 60", "steps = 100000")
        coordinator.start_run(config, "scaled")
        wait_until(lambda: stack.run().step, "a first step", 240)
        print(stack.compose(*words, "scale", "rollout=2", "--wait", timeout=400))
        (request,) = coordinator.scale_requests(1)
        assert request.state == SCALE_STATE_ACTIVE
        name = f"{stack.name}-{request.scaled[0].launch_id}"
        shown = "{{.State.Status}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.PidsLimit}}"
        assert docker("inspect", "--format", shown, name).strip() == "running true 4096"
        assert request.scaled[0].replica_id in {r.registration.replica_id for r in stack.replicas("rollout")}
        wait_until(
            lambda: any(r.status.done_groups and r.registration.launch_id for r in stack.replicas("rollout")),
            "the new one works",
            240,
        )
        print(stack.compose(*words, "scale", "rollout=1", "--wait", timeout=400))
        assert [r.registration.launch_id for r in stack.replicas("rollout")] == [""]
        assert name not in docker("ps", "--all", "--format", "{{.Names}}").split()

        coordinator.scale_out(ScaleOutRequest(replicas=2))  # for `down --remove-orphans`
        wait_until(lambda: coordinator.scale_requests(1)[0].state == SCALE_STATE_ACTIVE, "active again", 240)
        step = stack.run().step
        wait_until(lambda: stack.run().step > step, "it goes on", 240)
        coordinator.stop_run("scaled", "seen enough")
        wait_until(lambda: stack.run().state == RUN_STATE_STOPPED, "the end", 240)
        run = stack.run()
        assert (run.groups.open, run.groups.published) == (0, run.groups.trained + run.groups.dropped)
    assert docker("ps", "--all", "--quiet", "--filter", f"label=com.docker.compose.project={stack.name}") == ""
