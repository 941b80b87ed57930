"""`relaxd fork`: the settings that it changes, and the numbers beside the original's."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.fork_command import changed_config, far_steps
from relaxd.cli.main import app
from relaxd.cli.reading.run_tables import shown_metrics
from relaxd.client import CliError
from relaxd.config.load_toml import ConfigError, load
from relaxd.report.charts import chart_data
from relaxd.run_folder import Fork, with_original, write_fork
from tests.kit.cases import each
from tests.kit.run_folders import write_run

TASK = """
run.steps = 4
model.path = "nothing"
data.source = "addition"
reward.name = "addition"
"""
RUN = load(f"{TASK}algorithm.clip_low = 0.1")


def test_changes_keep_the_other_settings() -> None:
    assert changed_config(RUN, [], "run-1") is RUN
    changed = changed_config(RUN, ["trainer.optimizer.lr=3e-5", "trainer.epochs=2"], "run-1")
    assert (changed.trainer.optimizer.lr, changed.trainer.epochs) == (3e-5, 2)
    assert changed.algorithm == RUN.algorithm


def test_another_algorithm_begins_with_its_defaults() -> None:
    other = changed_config(RUN, ["algorithm.name=gspo"], "run-1").algorithm
    assert other == load(f'{TASK}algorithm.name = "gspo"').algorithm
    same = changed_config(RUN, ["algorithm.name=grpo", "algorithm.clip_high=0.3"], "run-1").algorithm
    assert (same.clip_low, same.clip_high) == (0.1, 0.3)


def test_rewards_that_open_media_cannot_score_again() -> None:
    seeing = load(f'{TASK}reward.media = true\ndata.media_keys = {{audio = "sounds"}}\nrollout.engine = "transformers"')
    with pytest.raises(CliError, match=r"a reward that opens media .reward.media. can.t score recorded"):
        changed_config(seeing, ["reward.name=dummy"], "run-1")


@each(
    ("change", "problem"),
    [
        (
            "model.path=other",
            "model.path can't be changed by a fork: the weights are the run's; it can",
        ),
        ("data.source=file", "data.source can't be changed by a fork: its prompts are recorded"),
        ("rollout.samples_per_prompt=8", "rollout.samples_per_prompt can't be changed by a fork: its answers"),
        ("trainer.mini_batches=2", "trainer.mini_batches can't be changed by a fork: its steps keep their groups"),
        ("optimizer.lr=1e-6", "optimizer.lr is not a known setting; Relax's --lr is trainer.optimizer.lr here"),
        ("algorithm.clip=1", "--set algorithm.clip: algorithm.clip is not a known setting"),
        ("trainer.optimizer.lr=-1", "--set trainer.optimizer.lr: trainer.optimizer.lr = -1"),
    ],
)
def test_other_settings_are_refused_by_name(change: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.").replace("'", ".")):
        changed_config(RUN, [change], "run-1")


def test_a_change_without_a_value_is_refused() -> None:
    with pytest.raises(CliError, match=r"--set trainer\.epochs: expected NAME=VALUE"):
        changed_config(RUN, ["trainer.epochs"], "run-1")


def test_steps_that_were_not_done_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run("run-1", steps=4, done=3, config=RUN, outcome="COMPLETED")
    for words, problem in (
        (["--step", "5"], "has done 3 steps: there is no step after step 5 to train"),
        (["--step", "1", "--steps", "4"], "has done 3 steps: there is no step 5 to train"),
    ):
        done = CliRunner().invoke(app, ["fork", "run-1", *words])
        assert isinstance(done.exception, CliError)
        assert problem in str(done.exception)


def test_far_answers_are_warned_of() -> None:
    near = {"step": 1, "policy_drift_ess": 0.95, "policy_drift": 0.01}
    assert far_steps([near, {"step": 2}]) == ""
    warning = far_steps([near, {"step": 2, "policy_drift_ess": 0.4}, {"step": 3, "policy_drift": 12.0}])
    assert "at 2 of 3 steps, from step 2 on: their effective sample size is down to 40% of the tokens" in warning


def test_numbers_stand_beside_the_original_s(tmp_path: Path) -> None:
    original, fork = tmp_path / "run-1", tmp_path / "fork"
    for folder, loss in ((original, 0.5), (fork, 0.25)):
        folder.mkdir()
        lines = [{"step": step, "loss": loss, "tokens": 8.0} for step in (1, 2)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = [{"step": 2, "loss": 0.25, "tokens": 8.0}]
    assert list(with_original(fork, own)) == own, "it isn't known to be a fork"
    write_fork(fork, Fork("run-1", str(original), 1))
    (line,) = with_original(fork, own)
    assert line == {"step": 2, "loss": 0.25, "tokens": 8.0, "loss of original": 0.5}
    assert shown_metrics(sorted(line)) == ["loss", "loss of original"]
    first = chart_data([line])["sections"][0]
    assert first["title"] == "Beside the original"
    assert [one["values"] for one in first["charts"][0]["lines"]] == [[0.25], [0.5]]
