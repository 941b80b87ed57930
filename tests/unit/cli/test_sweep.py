"""Sweeps: which runs a file asks for, and the table that compares them."""

from pathlib import Path
from typing import Any

import pytest

from relaxd.best_checkpoint import parse_metric
from relaxd.cli.sweep_command import SweepRow, plan_runs, read_sweep, sweep_table, write_sweep
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError
from relaxd.report.run_result import RunResult

BASE = """
run.steps = 2
model.path = "nothing"
data.source = "addition"
reward.name = "addition"
eval.prompts = 2
"""


def planned(folder: Path, text: str) -> list[dict[str, Any]]:
    file = folder / "lr test.toml"
    file.write_text(f'base = "base.toml"\n{text}')
    (folder / "base.toml").write_text(BASE)
    return [{"run_id": run.run_id, **run.settings} for run in plan_runs(file, read_sweep(file))]


def test_a_grid_has_a_run_for_each_combination(tmp_path: Path) -> None:
    runs = planned(tmp_path, '[grid]\ntrainer.optimizer.lr = [1e-6, 1e-5]\n"algorithm.name" = ["grpo", "gspo"]')
    assert [(run["trainer.optimizer.lr"], run["algorithm.name"]) for run in runs] == [
        (1e-6, "grpo"),
        (1e-6, "gspo"),
        (1e-5, "grpo"),
        (1e-5, "gspo"),
    ]
    assert all(run["run_id"].startswith("lr-test-") for run in runs)
    # An id depends on its run's settings alone, so that what is done is known in a larger sweep, too.
    more = planned(tmp_path, '[[runs]]\nalgorithm.name = "gspo"\n[[runs]]\ntrainer.optimizer.lr = 1e-5')
    assert more[1]["run_id"] == runs[2]["run_id"]
    changed = planned(tmp_path, "[settings]\nrun.steps = 3\n[[runs]]\ntrainer.optimizer.lr = 1e-5")
    assert changed[0]["run_id"] != runs[2]["run_id"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has neither grid nor runs"),
        ("[grid]\nrun.steps = [1]\n[[runs]]\nrun.steps = 1", "has both grid and runs"),
        ("[grid]\nrun.steps = []", "grid.run.steps has no value"),
        ("[grid]\nrun.steps = 3", "grid.run.steps: Input should be a valid list"),
        ("[grid]\nrun.steps = [1, 1]", "two runs have the same settings"),
        ('metric = "reward"\n[grid]\nrun.steps = [1]', 'metric: Value error, it must be "eval.SET.METRIC"'),
        ('metric = "eval.math.reward"\n[grid]\nrun.steps = [1]', "there is no evaluation set 'math'"),
        ("grids = 3", "grids: Extra inputs"),
        ("[grid]\nrun.steps = [1, 2", "can't be read"),
        ("[grid]\nrun.seed = [" + "1, " * 1001 + "]", "grid has 1001 combinations, more than 1000"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(CliError) as error:
        planned(tmp_path, text)
    assert problem in str(error.value)


def test_wrong_settings_are_refused_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.optimizer\.lr"):
        planned(tmp_path, "[grid]\ntrainer.optimizer.lr = [1e-6, -1]")


def row(run_id: str, lr: float, rewards: list[float], evaluations: dict[int, float]) -> SweepRow:
    lines = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards, 1)]
    lines += [{"step": step, "eval_response_length": value} for step, value in evaluations.items()]
    result = RunResult(
        folder=Path(), summary={"outcome": "completed"}, lines=lines, config_toml="", config=None, code={}, samples=[]
    )
    return SweepRow(run_id=run_id, settings={"trainer.optimizer.lr": lr}, result=result if rewards else None)


def test_the_table_has_the_best_run_first(tmp_path: Path) -> None:
    rows = [
        row("a", 1e-6, [0.1, 0.2], {1: 30.0, 2: 40.0}),
        row("b", 1e-5, [0.5], {1: 20.0, 2: 35.0}),
        row("c", 1e-4, [], {}),
    ]
    metric = parse_metric("-eval.held_out.response_length")
    titles, cells = sweep_table(rows, metric)
    of_metric = ["best response_length", "at step", "last response_length"]
    assert titles == ["run", "trainer.optimizer.lr", "state", "steps", "reward", *of_metric]
    assert cells == [
        ["b", "1e-05", "completed", "1", "0.5", "20", "1", "35"],
        ["a", "1e-06", "completed", "2", "0.15", "30", "1", "40"],
        ["c", "0.0001", "not begun", "", "", "", "", ""],
    ]
    assert [line[0] for line in sweep_table(rows, None)[1]] == ["b", "a", "c"]
    table, plot = write_sweep(tmp_path / "sweep", rows, metric)
    assert table.read_text().splitlines()[1] == ",".join(cells[0])
    assert plot.read_bytes().startswith(b"\x89PNG")
