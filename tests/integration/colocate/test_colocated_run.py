"""A colocated run with real processes on a CPU: whose turn it is, and what becomes of it when somebody dies."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from relaxd.client import CliError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT, TRAINER
from relaxd.v1.replica_pb2 import GetStatusRequest, ReplicaStatus
from relaxd.v1.replica_pb2_grpc import ReplicaStub
from tests.e2e.conftest import CONFIG, REWARD, Workplace
from tests.kit.finished_runs import check_books, read_summary
from tests.kit.models import make_tiny_model
from tests.kit.waiting import wait_until

PATIENCE = 300.0
STEPS = 400
"""More than are done: the run is stopped."""


@pytest.fixture
def workplace(tmp_path: Path) -> Iterator[Workplace]:
    model = make_tiny_model(tmp_path / "tiny")
    config = CONFIG.format(model=model, steps=STEPS).replace("[eval]\nprompts = 4", "[eval]\nprompts = 0")
    config = config.replace("[model]", "colocate = true\n\n[model]").replace(
        "max_new_tokens = 12", "max_new_tokens = 40"
    )
    (tmp_path / "run.toml").write_text(config + "\n[board]\nmax_staleness = 0\nlease_seconds = 3.0\n")
    (tmp_path / "tiny_reward.py").write_text(REWARD)
    place = Workplace(tmp_path)
    yield place
    place.end()
    place.relaxd("down")


class Watched:
    """The stack, looked at from outside."""

    def __init__(self, workplace: Workplace) -> None:
        self.folder = workplace.folder / "runs" / "r"
        self._state = StateFolder(workplace.folder / ".relaxd")
        self._logs = self._state.path / "logs"

    def service(self, role: str) -> psutil.Process:
        """The process of a service."""
        stack = self._state.read()
        assert stack is not None
        return psutil.Process(next(s.pid for s in stack.services if s.role == role))

    def child(self, role: str) -> psutil.Process:
        """Its engine, or its rank."""
        return self.service(role).children()[0]

    def status(self, role: str) -> ReplicaStatus:
        """What a replica says now."""
        stack = self._state.read()
        assert stack is not None
        with CoordinatorClient(stack.coordinator) as coordinator:
            address = next(r.registration.address for r in coordinator.replicas() if r.registration.role == role)
        with grpc.insecure_channel(address) as channel:
            answer: ReplicaStatus = ReplicaStub(channel).GetStatus(GetStatusRequest(), timeout=5).status
        return answer

    def steps(self) -> int:
        """Steps that are recorded."""
        path = self.folder / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        starting = (CliError, grpc.RpcError, psutil.Error, StopIteration, IndexError, AssertionError)
        wait_until(condition, what, PATIENCE, forgive=starting, explain=self.logs, pause_seconds=0.005)

    def logs(self) -> str:
        names = ("coordinator", "trainer", "rollout")
        return "".join(f"--- {name}\n{(self._logs / f'{name}.log').read_text()[-4000:]}" for name in names)


def generating(watched: Watched) -> bool:
    status = watched.status(ROLLOUT)
    return status.awake and status.weights.term > 0 and status.held_groups > 0


def training(watched: Watched) -> bool:
    return watched.status(TRAINER).awake and not watched.status(ROLLOUT).awake


@pytest.mark.night
@pytest.mark.timeout(900)
def test_whoever_dies_in_whatever_phase_the_turns_go_on(workplace: Workplace) -> None:
    process = workplace.start("run", "run.toml", "--run-id", "r")
    watched = Watched(workplace)
    watched.wait("two steps", lambda: watched.steps() >= 3)
    deaths = (
        ("the engine while it generates", generating, lambda: watched.child("rollout")),
        ("the engine in its sleep", training, lambda: watched.child("rollout")),
        ("the trainer's rank in its sleep", generating, lambda: watched.child("trainer")),
        ("the trainer's rank while it trains", training, lambda: watched.child("trainer")),
        ("the coordinator while the engine generates", generating, lambda: watched.service("coordinator")),
        ("the coordinator while the trainer trains", training, lambda: watched.service("coordinator")),
        ("the rollout service while it generates", generating, lambda: watched.service("rollout")),
    )
    for what, phase, victim in deaths:
        watched.wait(what, lambda phase=phase: phase(watched))
        before, began = watched.steps(), time.monotonic()
        victim().kill()
        watched.wait(f"two more steps after the death of {what}", lambda before=before: watched.steps() >= before + 2)
        print(f"{what}: two steps later after {time.monotonic() - began:.1f} s")
    code, output = workplace.relaxd("stop", "r")
    assert code == 0, output
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output

    summary = read_summary(watched.folder)
    check_books(summary, steps=summary["steps"])
    entries = [json.loads(line) for line in (watched.folder / "ledger.jsonl").read_text().splitlines()]
    trained = [group for entry in entries for group in entry["plan"]["groups"]]
    assert len({group.partition("~")[0] for group in trained}) == len(trained)  # no prompt twice
    assert all(entry["metrics"]["staleness_max"] == 0 for entry in entries)
    # Whoever starts has the device without a change of turns, so a step after such a start tells of none.
    switched = [entry["metrics"] for entry in entries if "switch_seconds" in entry["metrics"]]
    assert len(switched) >= len(entries) - 3
    parts = ("engine_sleep", "engine_wake", "transfer", "trainer_offload", "trainer_onload")
    usual = [metrics for metrics in switched if all(f"switch_{part}_seconds" in metrics for part in parts)]
    assert len(usual) >= len(entries) // 2
    for metrics in usual:
        assert metrics["switch_seconds"] == pytest.approx(sum(metrics[f"switch_{part}_seconds"] for part in parts))
    log = (watched.folder / "logs" / "coordinator.log").read_text()
    moves = re.findall("(train|synchronise): done", log)
    assert moves.count("synchronise") >= summary["steps"] - 4
