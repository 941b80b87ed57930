"""`relaxd evaluation` on a run's folder, without any service."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from relaxd.cli.main import app
from relaxd.client import CliError
from services.coordinator.state.records import Outcome
from tests.kit.run_folders import write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run("mine", steps=9, done=0, outcome=Outcome.STOPPED).resolve()


def keep(folder: Path, step: int, *answers: tuple[str, float, str]) -> None:
    (folder / "evaluations").mkdir(exist_ok=True)
    lines = [
        {"index": index, "prompt": f"What is {index} + 1?", "answer": str(index + 1), "response": response}
        | {"reward": reward, "error": error, "parts": {}, "length": 3, "finish_reason": "stop"}
        for index, (response, reward, error) in enumerate(answers)
    ]
    path = folder / "evaluations" / f"step-{step:06d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shown(folder: Path, *words: str) -> str:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["evaluation", "--folder", str(folder), *words])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_newest_answers_are_beside_the_first(folder: Path) -> None:
    keep(folder, 0, ("[bold]one", 0.0, ""), ("", 0.0, ""))
    keep(folder, 5, ("5", 0.5, ""), ("6", 0.5, ""))
    keep(folder, 10, ("1", 1.0, ""), ("2\x1b[2J", 0.0, "reward: ValueError"))
    lines = [line.split() for line in shown(folder).splitlines()]
    assert lines[0] == ["prompt", "answer", "response,", "step", "0", "reward", "response,", "step", "10", "reward"]
    assert lines[1] == ["What", "is", "0", "+", "1?", "1", "[bold]one", "0.00", "1", "1.00"]
    assert lines[2] == ["What", "is", "1", "+", "1?", "2", "(nothing)", "0.00", "2\\u001b[2J", "reward:", "ValueError"]
    assert "response, step 5 " in shown(folder, "--step", "5")
    assert [line.split() for line in shown(folder, "--step", "0", "--limit", "1").splitlines()] == [
        ["prompt", "answer", "response,", "step", "0", "reward"],
        ["What", "is", "0", "+", "1?", "1", "[bold]one", "0.00"],
    ]
    (answer,) = map(json.loads, shown(folder, "--json", "--limit", "1").splitlines())
    assert (answer["response"], answer["reward"]) == ("1", 1.0)


def test_the_results_of_each_set_are_above_its_answers(folder: Path) -> None:
    line = {"step": 0, "eval_reward": 0.5, "eval/sums/reward": 0.25, "eval/sums/pass_at_2": 0.5, "eval/sums/prompts": 4}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "evaluations" / "sums").mkdir(parents=True)
    answer = {"index": 0, "sample": 1, "reward": 1.0, "error": ""}
    (folder / "evaluations" / "sums" / "step-000000.jsonl").write_text(json.dumps(answer))
    lines = [line.split() for line in shown(folder).splitlines()]
    assert lines[0] == ["set", "step", "metric", "value"]
    assert lines[1:3] == [["held_out", "0", "reward", "0.500"], ["sums", "0", "prompts", "4"]]
    assert lines[3:5] == [["reward", "0.250"], ["pass@2", "0.500"]]
    assert lines[-1] == ["prompt", "0", "(not", "kept)", "1.00"]
    with pytest.raises(CliError, match="no evaluation set 'sms'; did you mean 'sums'"):
        shown(folder, "--set", "sms")


def test_what_there_is_not_is_said(folder: Path) -> None:
    with pytest.raises(CliError, match="run mine has no answers of an evaluation"):
        shown(folder)
    keep(folder, 0, ("1", 1.0, ""))
    keep(folder, 12, ("1", 1.0, ""))
    with pytest.raises(CliError, match="no evaluation of step 3") as error:
        shown(folder, "--step", "3")
    assert error.value.hint == "there are those of 0, 12"
