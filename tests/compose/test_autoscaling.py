"""The autoscaler with containers of real engines: out while they are what is slow, in while rewards are."""

import os

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config.load_toml import load_file
from relaxd.config.write_toml import dump
from relaxd.v1 import scaling_pb2 as pb
from tests.compose.stack import Stack, docker, running
from tests.kit.waiting import wait_until

REWARD = """
import time
from pathlib import Path

def gated(sample):
    if Path(__file__).with_name("slow").exists():
        time.sleep(2)
    return len(set(sample.response)) / 64
"""
SETTINGS = {
    "run.steps": "100000",
    "eval.prompts": "0",
    "reward.name": "gated_reward:gated",
    "rollout.samples_per_prompt": "4",
    "rollout.max_running_samples": "4",
    "rollout.max_new_tokens": "64",
    "rollout.min_new_tokens": "64",
    "trainer.groups_per_step": "2",
    "autoscale.mode": "on",
    "autoscale.max_replicas": "2",
    "autoscale.out_seconds": "10",
    "autoscale.out_cooldown_seconds": "10",
    "autoscale.in_seconds": "10",
    "autoscale.in_cooldown_seconds": "10",
}


@pytest.mark.night
@pytest.mark.timeout(1800)
def test_containers_of_engines_follow_the_load(stack: Stack) -> None:
    engine_socket = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    settings = {
        "COMPOSE_FILE": "compose.yaml:compose.scaling.yaml",
        "DOCKER_SOCKET": engine_socket,
        "DOCKER_GROUP": str(os.stat(engine_socket).st_gid),
        "CONSOLE_REPLICAS": "0",
    }
    docker("compose", "build", "launcher", timeout=600, environment=settings)
    code = stack.examples / "gated_reward.py"
    code.write_text(REWARD)
    code.chmod(0o644)
    words = [word for name, value in SETTINGS.items() for word in (f"--{name}", value)]
    with running(stack, settings), CoordinatorClient(stack.address) as coordinator:
        stack.compose("cp", str(stack.examples.parent / "tiny"), "coordinator:/models/")
        coordinator.start_run(dump(load_file(stack.examples / "tiny.toml", words)), "elastic")
        wait_until(lambda: len(stack.replicas("rollout")) == 2, "a second engine", 300)
        added = coordinator.scale_requests()[0]
        assert (added.direction, added.replicas, added.request_id[:5]) == (pb.SCALE_DIRECTION_OUT, 2, "auto-")
        wait_until(
            lambda: any(one.registration.launch_id and one.status.done_groups for one in stack.replicas("rollout")),
            "groups of the second engine",
            240,
        )

        (stack.examples / "slow").touch()
        wait_until(lambda: len(stack.replicas("rollout")) == 1, "one engine again", 300)
        removed = coordinator.scale_requests()[0]
        assert (removed.direction, removed.replicas, removed.request_id[:5]) == (pb.SCALE_DIRECTION_IN, 1, "auto-")
        wait_until(lambda: coordinator.scale_requests()[0].state == pb.SCALE_STATE_DONE, "its container's end", 60)
        assert added.scaled[0].launch_id not in docker("ps", "--all", "--format", "{{.Names}}")

        (stack.examples / "slow").unlink()
        coordinator.stop_run("elastic", "seen enough")
        wait_until(lambda: not stack.run().groups.open, "the end", 240)
        run = stack.run()
        assert run.groups.published == run.groups.trained + run.groups.dropped
