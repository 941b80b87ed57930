"""compose.gpu.yaml without its GPUs: replicas that share the host's name are restarted when they hang, and drain."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.v1.coordinator_pb2 import RUN_STATE_STOPPED
from tests.compose.stack import Stack, docker, running
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.night

# On the CPU images, without devices, and without raising limits, which an engine inside of a sandbox may not.
ON_CPU = """
services:
  trainer:
    image: relaxd/trainer:${RELAXD_VERSION:-dev}
    build: !reset null
    ulimits: !reset null
    deploy: {resources: {reservations: !reset null}}
  rollout:
    image: relaxd/rollout:${RELAXD_VERSION:-dev}
    build: !reset null
    ulimits: !reset null
    deploy: {resources: {reservations: !reset null}}
"""
GRACE_SECONDS, ROLLOUT_GRACE_SECONDS = 55, 70
SLOW_REWARD = """
import time

def sleep(sample):
    time.sleep(600)
"""


@pytest.mark.timeout(1800)
def test_with_the_hosts_name_replicas_are_restarted_and_drain(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text(ON_CPU)
    (stack.examples / "slow_reward.py").write_text(SLOW_REWARD)
    engine_socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    settings = {
        "COMPOSE_FILE": f"compose.yaml:compose.gpu.yaml:compose.scaling.yaml:{tmp_path / 'cpu.yaml'}",
        "DOCKER_SOCKET": engine_socket,
        "DOCKER_GROUP": str(os.stat(engine_socket).st_gid),
        "REWARD_REPLICAS": "2",
        "GRACE_SECONDS": str(GRACE_SECONDS),
        "ROLLOUT_GPU_GRACE_SECONDS": str(ROLLOUT_GRACE_SECONDS),
    }
    docker("compose", "build", "launcher", timeout=600, environment=settings)
    with running(stack, settings), CoordinatorClient(stack.address) as coordinator:
        for role in ("trainer", "rollout"):
            containers = stack.containers(role)
            assert {one["HostConfig"]["UTSMode"] for one in containers} == {"host"}
            instances = {replica.registration.instance for replica in stack.replicas(role)}
            assert instances == {one["Id"][:12] for one in containers}

        stack.compose("cp", str(tmp_path / "tiny"), "coordinator:/models/")
        config = (stack.examples / "tiny.toml").read_text().replace("steps = 60", "steps = 100000")
        config = config.replace("[reward]", "[reward]\ntimeout_seconds = 600").replace("prompts = 8", "prompts = 0")
        coordinator.start_run(config, "hangs")
        wait_until(lambda: stack.run().step, "a first step", 240)

        # A trainer that hangs can't end by itself: the launcher restarts its container.
        (before,) = stack.containers("trainer")
        os.kill(before["State"]["Pid"], signal.SIGSTOP)  # the service: with `pid: host` Docker starts no init
        wait_until(
            lambda: stack.containers("trainer")[0]["State"]["Pid"] not in (0, before["State"]["Pid"]), "a restart", 240
        )
        assert stack.containers("trainer")[0]["Id"] == before["Id"]
        step = stack.run().step
        wait_until(lambda: stack.run().step > step, "it trains again", 240)
        coordinator.stop_run("hangs", "seen enough")
        wait_until(lambda: stack.run().state == RUN_STATE_STOPPED, "the end", 240)

        # A replica that is scaled away has all of its grace to finish what it holds, and then hands it back.
        assert {one["Config"]["StopTimeout"] for one in stack.containers("rollout")} == {15 + ROLLOUT_GRACE_SECONDS}
        coordinator.start_run(config.replace("tiny_reward:letters", "slow_reward:sleep"), "drains")
        last = next(one for one in stack.containers("reward") if one["Name"].endswith("-2"))

        def holds_groups() -> bool:
            (found,) = [one for one in stack.replicas("reward") if one.registration.instance == last["Id"][:12]]
            return found.status.held_groups > 0

        wait_until(holds_groups, "a replica holds groups", 240)
        ended = subprocess.Popen(["docker", "wait", last["Id"]], stdout=subprocess.PIPE, text=True)
        begun = time.monotonic()
        stack.scale(reward=1)
        seconds = time.monotonic() - begun
        assert ended.communicate(timeout=180)[0].strip() == "0"
        print(f"drained for {seconds:.1f} s")
        assert GRACE_SECONDS - 5 < seconds < GRACE_SECONDS + 15
