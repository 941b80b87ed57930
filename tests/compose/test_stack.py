"""The images, and a run in containers through scaling, deaths and a coordinator that is away."""

import json
from pathlib import Path

import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from tests.compose.stack import SERVICES, Run, Stack, bridge_address, docker, running
from tests.kit.otlp import OtlpReceiver, otlp_receiver
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow
MEGABYTES = {"advantage": 350, "coordinator": 850, "reward": 500}


@pytest.mark.timeout(1800)
def test_images_are_small_and_careful(images: dict[str, str]) -> None:
    for service, image in images.items():
        found = json.loads(docker("image", "inspect", image))[0]
        config = found["Config"]
        size = found["Size"] / 1e6
        print(f"{image}: {size:.0f} MB")
        assert size <= MEGABYTES.get(service, 2000), f"{image} has {size:.0f} MB"
        assert config["User"] == "relaxd"
        assert config["Labels"]["org.opencontainers.image.title"] == f"relaxd {service}"
        if service != "cli":
            assert config["StopSignal"] == "SIGTERM"
            assert config["Healthcheck"]["Test"] == ["CMD", "python", "-m", "relaxd.rpc.health_check"]
        if service in MEGABYTES:
            with pytest.raises(AssertionError, match="No module named 'torch'"):
                docker("run", "--rm", "--entrypoint", "python", image, "-c", "import torch")


def working(stack: Stack, role: str, count: int, at_least: int = 1) -> bool:
    """Whether there are `count` replicas of a role, and each has done groups."""
    replicas = stack.replicas(role)
    return len(replicas) == count and all(replica.status.done_groups >= at_least for replica in replicas)


def new_at_work(stack: Stack, role: str, known: set[str]) -> bool:
    """Whether a replica of a role that isn't one of those known has done groups."""
    replicas = (one for one in stack.replicas(role) if one.registration.replica_id not in known)
    return any(replica.status.done_groups for replica in replicas)


@pytest.mark.timeout(1800)
def test_a_run_through_scaling_and_deaths(stack: Stack, tmp_path: Path) -> None:
    with otlp_receiver(bridge_address()) as receiver, running(stack, receiver.environment()):
        stack.compose("cp", str(tmp_path / "tiny"), "coordinator:/models/")
        run = Run(stack, "examples/tiny.toml", "--run.steps", "100000", "--run-id", "containers")
        run.reach(3)
        assert_confined(stack)

        # Up, without a pause: what there was goes on, and every new replica gets to work.
        before = stack.run().step
        seconds = stack.scale(rollout=3, reward=3)
        wait_until(lambda: working(stack, "rollout", 3), "three rollout replicas at work", 240)
        wait_until(lambda: working(stack, "reward", 3), "three reward replicas at work", 240)
        print(f"scaled up in {seconds:.1f} s")
        assert stack.run().step > before
        hosts = {container["Config"]["Hostname"] for container in stack.containers("rollout")}
        assert {replica.registration.replica_id.split("-")[1] for replica in stack.replicas("rollout")} == hosts

        # Processes die inside their containers, which come back.
        for service in ("rollout", "reward"):
            known = {replica.registration.replica_id for replica in stack.replicas(service)}
            host = stack.kill_process(service)
            restarted = {container["Id"][:12]: container["RestartCount"] for container in stack.containers(service)}
            wait_until(lambda s=service, h=host: restarts(stack, s).get(h), f"{service} {host} restarted", 180)
            assert restarted[host] in (0, 1)
            wait_until(lambda s=service, k=known: new_at_work(stack, s, k), f"{service} {host} at work again", 240)

        # The coordinator is away: nothing of the run is lost.
        step = run.step
        stack.compose("stop", "coordinator")
        stack.compose("start", "coordinator")
        wait_until(lambda: healthy(stack, "coordinator"), "the coordinator is healthy again", 180)
        run.reach(step + 3)

        # Down: replicas hand back what they hold, within their grace.
        seconds = stack.scale(rollout=1, reward=1)
        print(f"scaled down in {seconds:.1f} s")
        assert seconds < 40
        wait_until(lambda: len(stack.replicas("rollout")) == 1, "one rollout replica", 180)

        run.reach(60)  # by then it has learned
        with CoordinatorClient(stack.address) as coordinator:
            coordinator.stop_run("containers", "seen enough")
        output = run.finish()
        for line in ("run containers is stopped: seen enough", "groups in flight"):
            assert line in output
        stack.compose("cp", "coordinator:/work/runs/containers", str(tmp_path / "run"))
        assert restarts(stack, "trainer") == dict.fromkeys(restarts(stack, "trainer"), 0)
        assert_traced(receiver)

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] >= 60
    assert summary["trained"] == summary["steps"] * 4
    assert summary["in_flight"] == 0
    assert summary["published"] == summary["trained"] + summary["dropped"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(summary["steps"] + 1))
    rewards = [line["reward_mean"] for line in lines[1:]]
    print(f"reward {sum(rewards[:10]) / 10:.3f} to {sum(rewards[-10:]) / 10:.3f}")
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.1
    for name in ("model/model.safetensors", "report.html", "curve.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def assert_confined(stack: Stack) -> None:
    """No container can write to its image, and none has secrets of others."""
    for container in stack.containers():
        host, name = container["HostConfig"], container["Name"]
        assert (host["ReadonlyRootfs"], host["PidsLimit"], host["CapDrop"]) == (True, 4096, ["ALL"]), name
    inside = ("exec", "--no-TTY")
    for service in SERVICES:
        assert stack.compose(*inside, service, "ls", "/run/relaxd").split() == ["redis_password", "token", "tokens"]
    tokens = {stack.compose(*inside, service, "cat", "/run/relaxd/token") for service in SERVICES}
    assert len(tokens | {stack.token()}) == len(SERVICES) + 1
    with pytest.raises(AssertionError, match="Read-only file system"):
        stack.compose(*inside, "reward", "touch", "/home/relaxd/new")


def restarts(stack: Stack, service: str) -> dict[str, int]:
    """How often Docker restarted each container of a service, by short id."""
    return {container["Id"][:12]: container["RestartCount"] for container in stack.containers(service)}


def healthy(stack: Stack, service: str) -> bool:
    """Whether every container of a service is."""
    return all(container["State"]["Health"]["Status"] == "healthy" for container in stack.containers(service))


def assert_traced(receiver: OtlpReceiver) -> None:
    """Spans came from every service under its own name, and from each replica that there ever was."""
    spans = receiver.spans()
    assert {span.service for span in spans} == {f"relaxd-{service}" for service in SERVICES}
    for span in spans:
        assert span.instance.startswith(span.service.removeprefix("relaxd-") + "-")
    for service in ("rollout", "reward"):
        instances = {span.instance for span in spans if span.service == f"relaxd-{service}"}
        assert len(instances) >= 4, instances  # three, one of which died and came back as another
    stages = {"create rollout", *(f"process {stage}" for stage in ("rollout", "reward", "advantage", "train"))}
    trained = {span.trace_id for span in spans if span.name == "process train"}
    whole = [trace for trace in trained if {span.name for span in spans if span.trace_id == trace} >= stages]
    assert whole
