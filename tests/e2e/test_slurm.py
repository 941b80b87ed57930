"""deploy/slurm/relaxd.sbatch on a real Slurm of three nodes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.e2e.conftest import CONFIG, REWARD
from tests.kit.models import make_tiny_model
from tests.kit.slurm import Slurm, SlurmUnavailable, slurm_cluster
from tests.kit.waiting import wait_until

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "relaxd.sbatch"
STEPS = 200
SLOW_REWARD = """
import time
from tiny_reward import even_bytes

def slow(sample):
    time.sleep(0.05)
    return even_bytes(sample)
"""
"""Without it the run ends before the job is requeued."""

LIST_LOGS = """
import sys
from relaxd.rpc.client import sync_channel
from relaxd.v1.coordinator_pb2 import GetLogsRequest
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub

with sync_channel(sys.argv[1]) as channel:
    answer = CoordinatorStub(channel).GetLogs(GetLogsRequest(max_lines=2000), timeout=30)
print(*sorted({line.service for line in answer.lines}))
"""
"""Prints the services whose logs the coordinator at an address shows."""


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """The folder's path is short, because Slurm's sockets are in it: 108 bytes are the most."""
    try:
        with TemporaryDirectory(prefix="slurm-") as folder, slurm_cluster(Path(folder), nodes=3) as cluster:
            yield cluster
    except SlurmUnavailable as error:
        pytest.skip(f"no Slurm here: {error}")


class Job:
    """A job of the script, in a folder with a tiny model."""

    def __init__(self, slurm: Slurm, place: Path, *words: str, run: str = "", nodes: int = 1, **variables: str) -> None:
        own = {"RELAXD_PYTHON": sys.executable, "RELAXD_RUN": run, **variables}
        given = ",".join(["--export=ALL", *(f"{name}={value}" for name, value in own.items())])
        self._slurm, self._place = slurm, place
        self.id = slurm.call(
            "sbatch", "--parsable", f"--nodes={nodes}", given, str(SCRIPT), *words, folder=place
        ).strip()
        self.log = place / f"relaxd-{self.id}.log"
        self._ledger = place / "runs" / (run or f"job-{self.id}") / "ledger.jsonl"

    def steps(self) -> list[int]:
        """Return the numbers of the trained steps, in the order of the ledger."""
        lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
        return [json.loads(line)["step"] for line in lines]

    def logged(self) -> set[str]:
        """Return the services whose logs the coordinator shows, as a console would ask for them."""
        name = f"job-{self.id}"
        variables = [f"RELAXD_STACK={name}", f"RELAXD_TOKEN_FILE={self._place}/.relaxd-{name}/token"]
        address = f"{self._slurm.address(0)}:{20000 + int(self.id) % 10000}"
        return set(self._slurm.call("env", *variables, sys.executable, "-c", LIST_LOGS, address).split())

    def field(self, name: str) -> str:
        return self._slurm.job(self.id)[name]

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 180) -> None:
        def explain() -> str:
            return f"{self._slurm.job(self.id)}\n{self.log.read_text() if self.log.exists() else ''}"

        wait_until(condition, what, seconds, explain=explain, pause_seconds=0.2)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    make_tiny_model(place / "tiny")
    (place / "tiny_reward.py").write_text(REWARD)
    (place / "slow_reward.py").write_text(SLOW_REWARD)
    (place / "tiny.toml").write_text(CONFIG.format(steps=STEPS, model="tiny"))
    return place


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_job_outlives_a_node_and_a_requeue(slurm: Slurm, place: Path) -> None:
    job = Job(slurm, place, "tiny.toml", "--reward.name", "slow_reward:slow", nodes=2)
    job.until(lambda: len(job.steps()) >= 5, "five steps")
    assert job.field("NodeList") == "node[0-1]"
    slurm.kill_node(1)
    job.until(lambda: (job.field("Restarts"), job.field("JobState")) == ("1", "RUNNING"), "it is started again")
    assert job.field("NodeList") == "node[0,2]"
    before = len(job.steps())
    assert before < STEPS / 2
    job.until(lambda: len(job.steps()) >= before + 5, "five more steps, with another node")

    slurm.call("scancel", "--signal=USR1", "--batch", job.id)  # as Slurm does three minutes before the time limit
    job.until(lambda: job.field("JobState") == "COMPLETED", "its end", 300)
    assert job.field("Restarts") == "2"
    assert "the time limit is near" in job.log.read_text()
    assert job.steps() == list(range(1, STEPS + 1))


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_run_goes_on_in_another_job_of_one_node(slurm: Slurm, place: Path) -> None:
    words = ("tiny.toml", "--reward.name", "slow_reward:slow", "--run.steps", "40")
    first = Job(slurm, place, *words)
    first.until(lambda: len(first.steps()) >= 5, "five steps")
    assert {"coordinator", "redis", "trainer-node0-1", "reward-node0-2", "rollout-node0-4"} <= first.logged()
    slurm.call("scancel", first.id)
    first.until(lambda: first.field("JobState") == "CANCELLED", "its end")
    before = len(first.steps())
    assert before < 40
    second = Job(slurm, place, *words, run=f"job-{first.id}")
    second.until(lambda: second.field("JobState") == "COMPLETED", "its end")
    assert second.steps() == list(range(1, 41))


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_trainer_has_two_nodes(slurm: Slurm, place: Path) -> None:
    words = ("tiny.toml", "--trainer.ranks", "2", "--run.steps", "10")
    job = Job(slurm, place, *words, nodes=2, RELAXD_TRAINER_NODES="2", RELAXD_ENGINES_ON_HEAD="1")
    job.until(lambda: job.field("JobState") == "COMPLETED", "its end")
    assert job.steps() == list(range(1, 11))
    (log,) = place.glob(".relaxd-job-*/trainer.ranks-node1-1.log")
    assert "attempt 1: ranks 1 to 1 of trainer-" in log.read_text()
