"""The teacher of `relaxd demo --algorithm opd`: which model it is, and when one is trained first."""

import json
from pathlib import Path

import pytest

from relaxd.cli.demo import Task, best_teacher, demo, demo_config, distillation_config
from relaxd.cli.preparing.first_steps import example
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import load_file
from tests.kit.run_folders import write_run

DEMO = demo_config("grpo", seed=0, steps=None)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(run_id: str, accuracy: float | None, steps: int = 24, config: RunConfig = DEMO) -> Path:
    """The folder of a run that has ended, with its model."""
    folder = write_run(run_id, steps=steps, done=1, config=config, outcome="COMPLETED")
    summary = json.loads((folder / "summary.json").read_text()) | {"steps": steps, "accuracy_after": accuracy}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return folder


def nobody(config: RunConfig, run_id: str) -> None:
    raise AssertionError(f"{run_id} is trained")


def test_the_best_of_the_demos_models_teaches() -> None:
    assert best_teacher(DEMO) is None
    trained("first", 0.6)
    trained("best", 0.8, config=demo_config("gspo", seed=3, steps=None))
    trained("last", 0.7)
    # None of these can teach.
    trained("brief", 0.9, steps=3)
    trained("unevaluated", None)
    trained("student", 0.9, config=load_file(example("opd.toml")))
    other = DEMO.model_copy(update={"model": DEMO.model.model_copy(update={"path": "other"})})
    trained("other", 0.9, config=other)
    (trained("modelless", 0.9) / "model" / "config.json").unlink()
    (trained("damaged", 0.9) / "summary.json").write_text("{")
    teacher = best_teacher(DEMO)
    assert teacher is not None
    assert (teacher.run_id, teacher.model, teacher.accuracy) == ("best", Path("runs/best/model"), 0.8)

    said: list[str] = []
    config = distillation_config("d", 5, None, nobody, said.append)
    assert said == ["the teacher is the model of run best, with an accuracy of 0.80"]
    words = ["--roles.teacher.model", "runs/best/model", "--run.seed", "6"]
    assert config == load_file(example("opd.toml"), words)


def test_a_teacher_is_trained_if_there_is_none_of_as_many_steps() -> None:
    trained("brief", 0.9, steps=3)
    began: list[tuple[str, RunConfig]] = []

    def train(config: RunConfig, run_id: str) -> None:
        began.append((run_id, config))
        trained(run_id, 0.5, config.run.steps, config)

    said: list[str] = []
    config = distillation_config("d", 0, 5, train, said.append)
    assert began == [("d-teacher", demo_config("grpo", 0, 5))]
    assert said[0] == "no demo has trained a model here that can teach: training one first, as run d-teacher"
    assert (config.roles.teacher.model, config.run.steps, config.run.seed) == ("runs/d-teacher/model", 5, 1)
    # The next one has it.
    assert distillation_config("e", 0, 5, nobody, said.append).roles.teacher.model == "runs/d-teacher/model"
    assert distillation_config("e", 0, 2, nobody, said.append).roles.teacher.model == "runs/brief/model"


def test_a_teacher_that_was_stopped_doesnt_teach() -> None:
    with pytest.raises(CliError, match="run d-teacher ended without a model of 24 steps"):
        distillation_config("d", 0, None, lambda config, run_id: trained(run_id, 0.1, steps=2), str)


def test_a_folder_in_use_is_said_before_minutes_of_training() -> None:
    trained("d", 0.9, steps=2)
    with pytest.raises(CliError, match="contains an earlier run"):
        distillation_config("d", 0, None, nobody, str)


def test_the_task_chooses_the_example() -> None:
    assert demo_config("grpo", 3, None, Task.TOOL_USE) == load_file(example("tool-use.toml"), ["--run.seed", "3"])
    with pytest.raises(CliError, match="learns from a teacher that has learned addition, not tool-use"):
        demo(task=Task.TOOL_USE, algorithm="opd")
