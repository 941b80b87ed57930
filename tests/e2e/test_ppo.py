"""Runs of PPO go on with policy and critic as they were: after everything was killed, and after they were stopped."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest

from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.local.state_folder import StateFolder
from relaxd.roles import CRITIC
from relaxd.run_folder import checkpoint_steps, critic_folder
from tests.chaos.models import audit_models
from tests.e2e.conftest import Workplace
from tests.e2e.interrupted_runs import kill_everything_at, until
from tests.kit.finished_runs import check_books, read_summary

PPO = (
    *("--board.lease_seconds", "3", "--eval.prompts", "0", "--trainer.checkpoint.keep_step_files", "always"),
    *("--algorithm.name", "ppo", "--algorithm.old_logprobs", "current", "--rollout.samples_per_prompt", "1"),
    *("--trainer.mini_batches", "2", "--trainer.epochs", "2", "--roles.critic.optimizer.lr", "1e-2"),
)
KILLED = ("--run.steps", "9", "--trainer.checkpoint.every", "3", *PPO)
STOPPED = (
    *("--run.steps", "4000", "--trainer.checkpoint.every", "1000", *PPO),
    *("--roles.critic.placement", "service", "--roles.critic.threads", "1"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_policy_and_critic_go_on_after_everything_was_killed(workplace: Workplace, tiny_model: Path) -> None:
    state = StateFolder(workplace.folder / ".relaxd")
    folder = workplace.folder / "runs" / "r"
    kill_everything_at(workplace.start("run", "tiny.toml", "--run-id", "r", *KILLED), state, iter([4]))
    code, output = workplace.relaxd("resume", "r", timeout=240)
    assert code == 0, output
    check_books(read_summary(folder), steps=9)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert all(line["value_loss"] > 0 for line in lines)
    assert any("explained_variance" in line for line in lines)  # none in a step whose returns are all equal
    assert lines[-1]["optimizer_steps"] == 36
    # The checksum compared is that of both models.
    code, output = workplace.relaxd("replay", "r", "--step", "5")
    assert code == 0, output
    assert output.count("the same") == 4, output


def critic_rank(state: StateFolder) -> psutil.Process:
    """The process of the critic's only rank."""
    with CoordinatorClient(state.read().coordinator) as coordinator:
        (critic,) = (replica for replica in coordinator.replicas() if replica.registration.role == CRITIC)
    return psutil.Process(int(critic.status.gauges["rank0_pid"]))


@pytest.mark.night
@pytest.mark.timeout(600)
def test_a_run_that_was_stopped_goes_on_where_policy_and_critic_were(workplace: Workplace) -> None:
    """The critic hangs while the run is stopped, which waits for the critic's checkpoint of the last step."""
    state, folder = StateFolder(workplace.folder / ".relaxd"), workplace.folder / "runs" / "r"
    run = workplace.start("run", "tiny.toml", "--run-id", "r", *STOPPED)
    assert run.stdout is not None
    until(run.stdout, "^step +2/")
    rank = critic_rank(state)
    rank.send_signal(signal.SIGSTOP)
    stop = workplace.start("stop")
    assert stop.stdout is not None
    awaited = re.search(r"the critic's checkpoint of step (\d+)", until(stop.stdout, "the critic's checkpoint of step"))
    assert awaited
    step = int(awaited[1])
    assert checkpoint_steps(folder) == [step]
    assert checkpoint_steps(critic_folder(folder)) == []
    rank.send_signal(signal.SIGCONT)
    rest, _ = run.communicate(timeout=180)
    assert run.returncode == 0, rest
    assert checkpoint_steps(critic_folder(folder)) == checkpoint_steps(folder) == [step]
    check_books(summary := read_summary(folder), steps=step)
    assert summary["notes"] == []

    code, output = workplace.relaxd("resume", "r", "--run.steps", str(step + 2), timeout=240)
    assert code == 0, output
    check_books(read_summary(folder), steps=step + 2)
    assert checkpoint_steps(critic_folder(folder)) == checkpoint_steps(folder) == [step + 2, step]
    for role in ("critic", "trainer"):
        log = "".join(path.read_text() for path in (folder / "logs").glob(f"{role}*.log"))
        assert f"checkpoint step-{step:06d} is loaded" in log
        trained = [int(number) for number in re.findall(r"\bstep (\d+): .* in [\d.]+ s$", log, re.MULTILINE)]
        assert trained == list(range(1, step + 3)), (role, trained)
        assert "replayed" not in log
    assert audit_models(folder) == []
