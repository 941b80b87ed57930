"""Real engines come and go in the middle of a run, by the command that people use."""

import re
from collections import Counter

import psutil
import pytest

from relaxd.board import Board, stages_for
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.config import RunConfig
from relaxd.local.state_folder import StateFolder
from relaxd.roles import ROLLOUT
from relaxd.v1 import coordinator_pb2 as pb
from tests.e2e.conftest import Workplace
from tests.kit.boards import all_steps
from tests.kit.waiting import wait_until

REWARD = """
import time
from tiny_reward import even_bytes

def slow(sample):
    time.sleep(0.1)
    return even_bytes(sample)
"""
"""Engines that start would share the processors with a run that never waits."""


def engines(coordinator: CoordinatorClient) -> dict[str, pb.RegisteredReplica]:
    found = [replica for replica in coordinator.replicas() if replica.registration.role == ROLLOUT]
    return {replica.registration.replica_id: replica for replica in found}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_one_engine_then_three_then_one(workplace: Workplace) -> None:
    code, output = workplace.relaxd("up", "--port", "0")
    assert code == 0, output
    state = StateFolder(workplace.folder / ".relaxd").read()
    (workplace.folder / "slow_reward.py").write_text(REWARD)
    endless = ("--run.steps", "100000", "--eval.prompts", "0", "--reward.name", "slow_reward:slow")
    run = workplace.start("run", "tiny.toml", "--run-id", "elastic", *endless)
    assert run.stdout is not None
    assert any(line.startswith("step") for line in run.stdout)  # it trains

    code, output = workplace.relaxd("scale", "rollout=3", "--wait")
    assert code == 0, output
    assert re.search(r"rollout out to 3: creating \(2 creating\)", output)
    assert re.search(r"rollout out to 3: active \(2 active\)", output)
    with CoordinatorClient(state.coordinator) as coordinator:
        grown = engines(coordinator)
        assert len(grown) == 3
        new = {name: one.registration.address for name, one in grown.items() if one.registration.launch_id}
        assert len(new) == 2
        scaled_processes = [s.pid for s in StateFolder(workplace.folder / ".relaxd").read().services if s.launched]
        wait_until(lambda: all(engines(coordinator)[name].status.done_groups for name in new), "groups of each", 120)
        code, output = workplace.relaxd("scale", "rollout=1", "--wait", "--drain-seconds", "10")
        assert code == 0, output
        assert re.search(r"rollout in to 1: done \(2 done\)", output)
        assert engines(coordinator).keys() == {"rollout"}
        assert not [pid for pid in scaled_processes if psutil.pid_exists(pid)]
        code, output = workplace.relaxd("scale", "rollout=1")
        assert code == 0
        assert "nothing to do" in output

        step = coordinator.run().step
        wait_until(lambda: coordinator.run().step >= step + 2, "steps with the one that is left", 120)
        coordinator.stop_run("elastic", "seen enough")
        rest, _ = run.communicate(timeout=180)  # it may wait for someone to read its many lines
        assert run.returncode == 0, rest
        ended = coordinator.run("elastic")
    config = RunConfig.model_validate_json(ended.config_json)
    board = Board(state.redis, "elastic", stages_for(config), config.board)
    counts = board.counts()
    counts.check()
    trained = Counter(group for entry in all_steps(board, ended.folder) for group in entry.plan["groups"])
    assert set(trained.values()) == {1}
    assert (counts.open, counts.trained) == (0, len(trained))
    assert counts.published == counts.trained + counts.dropped
    assert set(counts.dropped_by_reason) <= {"run_ended", "zero_variance"}


def test_what_can_be_scaled_is_said(workplace: Workplace) -> None:
    for words, expected in (
        (["trainer=2"], "is not ROLE=COUNT: ROLE is one of ranks, rollout, reward, advantage"),
        (["rollout=0"], "is not ROLE=COUNT"),
        (["trainer"], "'trainer' is not ROLE=COUNT or ROLE"),
        (["--cancel", "rollout=2"], "--cancel takes a role, or nothing"),
        (["rollout=2", "--sglang-url", "http://gpu-1:30000"], "--sglang-url takes no ROLE=COUNT"),
        (["--request-state", "done_"], "'done_' is no state of a request: pending, creating"),
    ):
        code, output = workplace.relaxd("scale", *words, RELAXD_COORDINATOR="127.0.0.1:1")
        assert code == 1
        assert expected in output
