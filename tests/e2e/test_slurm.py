"""deploy/slurm/relaxd.sbatch on a real Slurm of three nodes."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    try:
        with slurm_cluster(tmp_path / "slurm", nodes=3) as cluster:
            yield cluster
    except SlurmUnavailable as error:
        pytest.skip(f"no Slurm here: {error}")


@pytest.mark.night
@pytest.mark.timeout(900)
def test_a_job_outlives_a_node_and_a_requeue(slurm: Slurm, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    make_tiny_model(place / "tiny")
    (place / "tiny_reward.py").write_text(REWARD)
    (place / "tiny.toml").write_text(CONFIG.format(steps=STEPS, model="tiny"))
    words = ["sbatch", "--parsable", "--nodes=2", f"--export=ALL,RELAXD_PYTHON={sys.executable}"]
    (place / "slow_reward.py").write_text(SLOW_REWARD)
    slow = ("--reward.name", "slow_reward:slow")
    job = slurm.call(*words, str(SCRIPT), "tiny.toml", *slow, folder=place).strip()
    run, log = place / "runs" / f"job-{job}", place / f"relaxd-{job}.log"

    def trained() -> int:
        ledger = run / "ledger.jsonl"
        return len(ledger.read_text().splitlines()) if ledger.exists() else 0

    def until(condition, what: str, seconds: float = 180) -> None:
        wait_until(condition, what, seconds, explain=lambda: f"{slurm.job(job)}\n{log.read_text()}", pause_seconds=0.2)

    until(lambda: trained() >= 5, "five steps")
    assert slurm.job(job)["NodeList"] == "node[0-1]"
    slurm.kill_node(1)
    until(lambda: slurm.job(job)["Restarts"] == "1" and slurm.job(job)["JobState"] == "RUNNING", "it is started again")
    assert slurm.job(job)["NodeList"] == "node[0,2]"
    before = trained()
    assert before < STEPS / 2
    until(lambda: trained() >= before + 5, "five more steps, with another node")

    slurm.call("scancel", "--signal=USR1", "--batch", job)  # as Slurm does three minutes before the time limit
    until(lambda: slurm.job(job)["JobState"] == "COMPLETED", "its end")
    assert slurm.job(job)["Restarts"] == "2"
    assert "the time limit is near" in log.read_text()
    steps = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
