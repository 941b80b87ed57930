"""Faults of a trainer over several hosts, which are services on this machine: nothing is lost or trained twice."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from relaxd.config import RunConfig
from relaxd.v1.replica_pb2 import REPLICA_STATE_STARTING
from tests.integration.trainer.hosts.host_kit import ranks_ended, trainer_over_hosts
from tests.integration.trainer.service_kit import TrainerProcess, make_config
from tests.kit.models import make_tiny_model
from tests.kit.namespaces import Node
from tests.kit.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.night, pytest.mark.timeout(300)]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = make_tiny_model(tmp_path / "model", architecture="qwen3")
    return make_config(
        model,
        run={"steps": 10},
        trainer={"ranks": 2, "hosts": 2, "checkpoint": {"every": 2}},
        board={"max_staleness": 0, "lease_seconds": 30},
    )


def test_a_killed_rank_is_replaced(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    with trainer_over_hosts(config, redis_url, tmp_path / "run") as run:
        run.begin()
        run.train(3)
        (pid,) = run.hosts[0].rank_pids()
        psutil.Process(pid).kill()
        killed = time.time()
        assert run.again() < 5 * PATIENCE
        assert run.coordinator.wait_for_detail("ranks-1: rank 1 was killed by signal 9")
        wait_until(lambda: run.hosts[0].rank_pids() not in ([], [pid]), "a heartbeat with the new rank", 20)
        (new,) = run.hosts[0].rank_pids()
        assert psutil.Process(new).create_time() < killed  # it was a spare one
        run.train(2)
        run.check_books()


def test_a_killed_host_is_awaited_and_takes_part_again(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    with trainer_over_hosts(config, redis_url, tmp_path / "run") as run:
        run.begin()
        run.train(3)
        run.hosts[0].kill()
        run.coordinator.wait_for_detail("waiting for 1 of the 2 hosts (trainer.hosts): ranks-1 does not answer")
        run.coordinator.wait(lambda: run.coordinator.status.state == REPLICA_STATE_STARTING)
        time.sleep(3)  # as long as a scheduler takes
        run.hosts[0].start()
        assert run.again() < 5 * PATIENCE
        run.train(2)
        run.check_books()


def test_a_spare_takes_the_place_of_a_dead_host(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    with trainer_over_hosts(config, redis_url, tmp_path / "run", spares=1) as run:
        run.begin()
        run.train(3)
        assert (len(run.hosts[0].rank_pids()), run.hosts[1].rank_pids()) == (1, [])
        run.hosts[0].kill()
        assert run.again() < 5 * PATIENCE
        wait_until(lambda: len(run.hosts[1].rank_pids()) == 1, "a heartbeat with its rank", 20)
        run.train(2)
        run.check_books()


def test_a_stopped_host_is_lost_until_it_goes_on(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    with trainer_over_hosts(config, redis_url, tmp_path / "run") as run:
        run.begin()
        run.train(2)
        host = run.hosts[0]
        (rank,) = host.rank_pids()
        host.process.send_signal(signal.SIGSTOP)
        run.coordinator.wait_for_detail("ranks-1 has been silent for 5 s")
        host.process.send_signal(signal.SIGCONT)
        run.again()
        ranks_ended([rank])
        run.train(2)
        run.check_books()


def test_an_old_trainer_that_comes_back_ends(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    with trainer_over_hosts(config, redis_url, tmp_path / "run") as run:
        run.begin()
        run.train(2)
        old = run.trainer
        old.process.send_signal(signal.SIGSTOP)
        run.trainer = TrainerProcess(run.coordinator, redis_url)
        try:
            run.again()
            run.train(2)
            old.process.send_signal(signal.SIGCONT)
            assert old.process.wait(60 * PATIENCE) == 1
            run.train(2)
            run.check_books()
        finally:
            run.trainer.close()


@dataclass(frozen=True)
class WithoutFolder(Node):
    """This machine, but with an empty folder in the place of one."""

    folder: str = ""

    def command(self, words: Sequence[str]) -> list[str]:
        hide = 'mount -t tmpfs none "$1" && shift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", hide, "sh", self.folder, *words]


@pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root")
def test_a_host_without_the_folder_of_the_run_is_named(config: RunConfig, redis_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with trainer_over_hosts(config, redis_url, folder, without=WithoutFolder("", "127.0.0.1", str(folder))) as run:
        said = run.coordinator.wait_for_detail("waiting for 1 of the 2 hosts (trainer.hosts): ranks-1 run run-1 did")
        assert f"the ranks doesn't see the run's folder: {folder} has no run.json" in said
