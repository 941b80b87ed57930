"""A run that keeps its best checkpoint, also when everything is killed while it evaluates."""

import json
from pathlib import Path

import pytest

from relaxd.best_checkpoint import parse_metric
from relaxd.local.state_folder import StateFolder
from relaxd.run_folder import checkpoint_steps
from tests.e2e.conftest import Workplace
from tests.e2e.test_resume import kill_everything_at

METRIC = "-eval.held_out.response_length"
SETTINGS = (
    *("--run.steps", "9", "--board.max_staleness", "0", "--eval.prompts", "4", "--eval.interval", "2"),
    *("--trainer.checkpoint.every", "4", "--trainer.checkpoint.keep", "1", "--trainer.checkpoint.keep_best", METRIC),
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
