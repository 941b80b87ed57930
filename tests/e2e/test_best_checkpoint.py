"""A run that keeps its best checkpoint, also when everything is killed while it evaluates."""

import json
from pathlib import Path

import pytest

from relaxd.best_checkpoint import parse_metric
from relaxd.local.state_folder import StateFolder
from relaxd.run_folder import checkpoint_steps, critic_folder
from tests.e2e.conftest import Workplace
from tests.e2e.interrupted_runs import kill_everything_at

METRIC = "-eval.held_out.response_length"
SETTINGS = (
    *("--run.steps", "9", "--board.max_staleness", "0", "--eval.prompts", "4", "--eval.interval", "2"),
    *("--trainer.checkpoint.every", "4", "--trainer.checkpoint.keep", "1", "--trainer.checkpoint.keep_best", METRIC),
)
LATER = """
import time

def later(sample):
    return time.time() / 1e9
"""
"""A reward of which every evaluation has more than the one before."""
CRITIC = (
    *("--algorithm.name", "ppo", "--rollout.samples_per_prompt", "1", "--reward.name", "later.py:later"),
    *("--roles.critic.placement", "service", "--roles.critic.threads", "1"),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exactly_one_best_checkpoint_is_kept_through_a_crash(workplace: Workplace, tmp_path: Path) -> None:
    code, output = workplace.relaxd("config", "check", "tiny.toml", *SETTINGS[:-1], "eval.math.reward")
    assert code == 1
    assert "there is no evaluation set 'math', there are held_out" in output

    state = StateFolder(workplace.folder / ".relaxd")
    folder = workplace.folder / "runs" / "r"
    kill_everything_at(workplace.start("run", "tiny.toml", "--run-id", "r", *SETTINGS), state, iter((4,)))
    code, output = workplace.relaxd("resume", "r", timeout=240)
    assert code == 0, output

    metric = parse_metric(METRIC)
    values = metric.values(json.loads((folder / "run.json").read_text())["evaluations"])
    assert 9 in values
    steps = checkpoint_steps(folder)
    best = metric.best({step: values[step] for step in steps if step in values})
    assert best is not None
    assert set(steps) == {9, best}
    # Whatever was evaluated and had a checkpoint was compared, so nothing else is better but versions without one.
    log = "".join(path.read_text() for path in (folder / "logs").glob("coordinator*.log"))
    for step, value in values.items():
        if metric.is_better(value, values[best]):
            assert f"version {step} can't become the best" in log, (step, values)

    code, output = workplace.relaxd("checkpoints", "r")
    assert code == 0, output
    assert f"best ({METRIC} = " in output
    code, output = workplace.relaxd("export", "r", str(tmp_path / "model"), "--best")
    assert code == 0, output
    assert f"step {best}: " in output
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.night
@pytest.mark.timeout(600)
@pytest.mark.parametrize("metric", ["eval.held_out.reward", "-eval.held_out.reward"])
def test_a_critic_service_keeps_the_checkpoints_that_the_trainer_keeps(workplace: Workplace, metric: str) -> None:
    (workplace.folder / "later.py").write_text(LATER)
    code, output = workplace.relaxd("run", "tiny.toml", "--run-id", "r", *SETTINGS[:-1], metric, *CRITIC)
    assert code == 0, output
    folder = workplace.folder / "runs" / "r"
    steps = checkpoint_steps(folder)
    assert steps[0] == 9
    assert checkpoint_steps(critic_folder(folder)) == steps
    if not metric.startswith("-"):
        assert steps == [9]  # the last evaluation was the best, after the last checkpoint
        return

    best, step = steps[-1], steps[-1] + 2
    assert best < 9
    again = ("--from-step", str(best), "--reset-moments", "--run.steps", str(step))
    code, output = workplace.relaxd("resume", "r", *again, timeout=240)
    assert code == 0, output
    assert checkpoint_steps(folder) == [step, best]
    assert checkpoint_steps(critic_folder(folder)) == [step, best]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(step + 1))
    assert best <= lines[-1]["critic_step"] < step
    assert f"reset_moments_after = [{best}]" in (folder / "config.toml").read_text()
