"""The autoscaler with real engines: out while the trainer waits for them, in while rewards are what is slow."""

import re
import subprocess
from collections.abc import Callable

import grpc
import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT
from relaxd.v1 import external_scaler_pb2
from relaxd.v1 import scaling_pb2 as pb
from relaxd.v1.external_scaler_pb2_grpc import ExternalScalerStub
from tests.e2e.conftest import Workplace
from tests.kit.ports import free_port
from tests.kit.waiting import wait_until

REWARD = """
import time
from pathlib import Path
from tiny_reward import even_bytes

def gated(sample):
    if Path(__file__).with_name("slow").exists():
        time.sleep(2)
    return even_bytes(sample)
"""
SETTINGS = {
    "run.steps": "100000",
    "eval.prompts": "0",
    "reward.name": "gated_reward:gated",
    "rollout.max_running_samples": "4",
    "rollout.max_new_tokens": "64",
    "rollout.min_new_tokens": "64",
    "autoscale.max_replicas": "2",
    "autoscale.out_seconds": "4",
    "autoscale.out_cooldown_seconds": "2",
    "autoscale.in_seconds": "4",
    "autoscale.in_cooldown_seconds": "2",
}


def engines(coordinator: CoordinatorClient) -> int:
    """Return the number of rollout replicas."""
    return sum(replica.registration.role == ROLLOUT for replica in coordinator.replicas())


def start_run(workplace: Workplace, mode: str, **environment: str) -> "tuple[str, subprocess.Popen[str]]":
    """Start services and a run that trains. Returns the coordinator's address and the command of the run."""
    code, output = workplace.relaxd("up", "--port", "0", **environment)
    assert code == 0, output
    state = StateFolder(workplace.folder / ".relaxd").read()
    (workplace.folder / "gated_reward.py").write_text(REWARD)
    settings = {**SETTINGS, "autoscale.mode": mode}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    run = workplace.start("run", "tiny.toml", "--run-id", "elastic", *words)
    assert run.stdout is not None
    assert any(line.startswith("step") for line in run.stdout)
    return state.coordinator, run


@pytest.mark.night
@pytest.mark.timeout(600)
def test_engines_come_while_the_trainer_waits_for_them_and_go_while_they_wait(workplace: Workplace) -> None:
    address, run = start_run(workplace, "dry_run")
    with CoordinatorClient(address) as coordinator:
        # A dry run says what it would do, and does nothing.
        wait_until(lambda: coordinator.autoscaler().decisions, "a decision", 240)
        decision = coordinator.autoscaler().decisions[0]
        assert (decision.replicas, decision.wanted_replicas, decision.request_id) == (1, 2, "")
        assert engines(coordinator) == 1

        code, output = workplace.relaxd("autoscale", "on")
        assert code == 0, output
        assert "the autoscaler is on (1 to 2 rollout replicas)" in output
        following = workplace.start("autoscale", "--follow")
        wait_until(lambda: engines(coordinator) == 2, "a second engine", 240)
        asked = coordinator.scale_requests()[0]
        assert (asked.direction, asked.replicas) == (pb.SCALE_DIRECTION_OUT, 2)
        assert coordinator.autoscaler().decisions[0].request_id == asked.request_id

        (workplace.folder / "slow").touch()
        wait_until(lambda: engines(coordinator) == 1, "one engine again", 240)
        asked = coordinator.scale_requests()[0]
        assert (asked.direction, asked.replicas) == (pb.SCALE_DIRECTION_IN, 1)
        code, output = workplace.relaxd("autoscale")
        assert code == 0
        assert re.search(r"2 to 1 +auto-\w+ +engines would be \d+% busy with one less", output), output

        code, output = workplace.relaxd("autoscale", "off")
        assert "the autoscaler is off" in output
        assert coordinator.autoscaler().reason == "it is off"
        (workplace.folder / "slow").unlink()
        coordinator.stop_run("elastic", "seen enough")
        rest, _ = run.communicate(timeout=180)
        assert run.returncode == 0, rest
        followed, _ = following.communicate(timeout=60)
        assert following.returncode == 0, followed
        for said in ("1 to 2 auto-", "2 to 1 auto-", "engines would be", "the autoscaler is off"):
            assert said in " ".join(followed.split()), followed


@pytest.mark.night
@pytest.mark.timeout(600)
def test_keda_gets_the_number_instead(workplace: Workplace) -> None:
    port = free_port()
    address, run = start_run(workplace, "on", RELAXD_KEDA_PORT=str(port))
    with CoordinatorClient(address) as coordinator, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        keda = ExternalScalerStub(channel)

        def wanted() -> int:
            request = external_scaler_pb2.GetMetricsRequest(metricName="relaxd-rollout-replicas")
            (value,) = keda.GetMetrics(request, timeout=5).metricValues
            return value.metricValue

        assert _refused(wanted)  # nothing is decided yet
        wait_until(lambda: wanted() == 2, "a second engine is wanted", 240, forgive=(grpc.RpcError,))
        assert (engines(coordinator), list(coordinator.scale_requests())) == (1, [])  # that is KEDA's to do
        code, output = workplace.relaxd("scale", "rollout=2", "--wait")  # in KEDA's place
        assert code == 0, output
        (workplace.folder / "slow").touch()
        wait_until(lambda: wanted() == 1, "one engine is enough", 240)
        assert engines(coordinator) == 2
        (workplace.folder / "slow").unlink()
        coordinator.stop_run("elastic", "seen enough")
        rest, _ = run.communicate(timeout=180)
        assert run.returncode == 0, rest
        wait_until(lambda: _refused(wanted), "no number without a run", 60)


def _refused(call: Callable[[], int]) -> bool:
    try:
        call()
    except grpc.RpcError as error:
        return bool(error.code() == grpc.StatusCode.FAILED_PRECONDITION)
    return False
