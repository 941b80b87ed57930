"""Commands on runs/NAME without any service: what they show, and what is refused before anything starts."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from relaxd.cli.main import app
from relaxd.client import CliError
from relaxd.local import stack
from services.coordinator.state.records import Evaluation, Outcome, Phase
from tests.kit.run_folders import CONFIG, write_run


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder. No command starts anything, or calls an address that it wasn't given."""
    monkeypatch.chdir(tmp_path)
    for name in ("RELAXD_STATE", "RELAXD_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("services were started")

    monkeypatch.setattr(stack, "up", never)
    return tmp_path


def relaxd(*words: str) -> Result:
    return CliRunner().invoke(app, [*words], env={"COLUMNS": "160"})


def shown(*words: str) -> Result:
    result = relaxd(*words)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refusal(*words: str) -> str:
    error = relaxd(*words).exception
    assert isinstance(error, CliError), error
    return f"{error} try: {error.hint}"


def test_a_command_never_calls_another_folders_services(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:  # their coordinator, at the default address
        other.bind(("127.0.0.1", 0))
        other.listen()
        monkeypatch.setattr(stack, "COORDINATOR_PORT", other.getsockname()[1])
        for words in (["stop"], ["pause"], ["checkpoint"], ["delete", "r"], ["scale", "rollout=2"]):
            assert "no services are up here" in refusal(*words)
        for words in (["samples"], ["watch"], ["metrics"], ["report"], ["logs"]):
            assert "runs has no run, and no services are up here" in refusal(*words)
        assert "no services are up here" in shown("status").output
        other.settimeout(0.05)
        with pytest.raises(TimeoutError):
            other.accept()


def test_an_interrupted_run_is_read_and_the_way_on_is_said() -> None:
    write_run("old", steps=2, done=2, age=3, outcome=Outcome.COMPLETED)
    new = write_run("new", steps=9, done=3)
    assert "and its services are gone; relaxd up continues it" in shown("samples").stderr
    (new / "logs").mkdir()  # as when they were started for it
    way_on = "run new has not ended (step 3/9), and its services are gone; relaxd resume new continues it\n"
    result = shown("samples", "--json", "-n", "3")
    assert [json.loads(line)["response"] for line in result.stdout.splitlines()] == [
        "answer 3b",
        "answer 3a",
        "answer 2b",
    ]
    assert result.stderr == way_on
    assert "answer 1a" in shown("samples", "--step", "1").stdout
    assert "no samples of step 7: run new has trained 3 steps" in refusal("samples", "--step", "7")
    watched = shown("watch")
    assert "step 2/9  reward 0.200" in watched.stdout
    assert watched.stderr == way_on
    for words in (["old"], ["runs/old"], ["--folder", "runs/old"]):
        assert shown("samples", *words).stderr == ""
        assert "step 2/2" in shown("watch", *words).stdout
    for command in ("status", "runs"):
        output = shown(command).output
        assert output.index("new") < output.index("old")  # the newest first
        assert "interrupted" in output
        assert way_on in output
    assert "stopped" in shown("status", "old").output
    assert "has not ended" not in shown("status", "old").output
    why = shown("why")
    assert "run new (running, step 3 of 9): it waits for services" in why.stdout
    assert why.stderr == way_on
    assert "waits for nothing: it has ended" in shown("why", "old").stdout
    assert "there is no run other" in refusal("status", "other")
    assert "runs/other is not the folder of a run" in refusal("samples", "other")
    for words in (["samples"], ["report"], ["checkpoints"], ["status"]):
        assert "did you mean old? relaxd runs lists them" in refusal(*words, "ol")
        assert "did you mean new? relaxd runs lists them" in refusal(*words, "nwe")
        assert "try: relaxd runs lists them" in refusal(*words, "other")
    report = shown("report", "new")
    assert "run new: running, 3 steps" in report.stdout
    assert "answer 3b" in Path("runs/new/report.html").read_text()


@pytest.mark.parametrize(("command", "code"), [("runs", 0), ("samples", 0), ("watch", 0), ("version", 2)])
def test_a_reader_that_has_enough_is_no_failure(command: str, code: int) -> None:
    write_run("r", steps=6, done=6, outcome=Outcome.COMPLETED)
    reader, writer = os.pipe()
    os.close(reader)  # as `head` does once it has its lines
    try:
        words = [sys.executable, "-m", "relaxd.cli", command]
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(writer)
    assert (done.returncode, bool(done.stderr)) == (code, bool(code)), done.stderr


def test_a_ledger_without_groups() -> None:
    write_run("begun", steps=9, done=0)
    assert "no groups yet" in shown("ledger", "begun", "--json").stderr
    write_run("old", steps=9, done=3)
    assert "old has no groups.jsonl" in refusal("ledger", "old")


def test_results_and_metrics_are_listed() -> None:
    evaluations = tuple(Evaluation(step=step, metrics={"eval_reward": step / 8}) for step in (0, 2, 6))
    write_run("r", steps=6, done=6, evaluations=evaluations, outcome=Outcome.COMPLETED)
    (row,) = [line.split() for line in shown("runs").output.splitlines() if line.startswith("r ")]
    assert row == ["r", "stopped", "6/6", "0.400", "0.00", "→", "0.75", "2026-01-02", "03:04", "90", "s"]
    lines = shown("metrics", "--last", "2").stdout.split()
    assert lines == ["reward_", "step", "mean", "loss", "5", "0.5", "0.5", "6", "0.6", "0.5"]
    assert json.loads(shown("metrics", "r", "loss", "--json").stdout.splitlines()[0]) == {"step": 1, "loss": 0.5}
    assert "has no metric 'los' try: there are loss, reward_mean" in refusal("metrics", "r", "los")


def test_logs_are_those_of_the_last_services_or_of_a_run() -> None:
    folder = write_run("r", steps=9, done=1)
    assert "its services were not started for it" in refusal("logs", "--run", "r")
    (folder / "logs").mkdir()
    (folder / "logs" / "trainer.log").write_text(
        "2026-01-01T00:00:02.000Z INFO trainer b\nTraceback\n2026-01-01T00:00:04.000Z INFO trainer d\n"
    )
    (folder / "logs" / "reward-1.log").write_text("2026-01-01T00:00:03.000Z INFO reward-1 c\nunfinished")
    lines = shown("logs", "--run", "r").stdout.splitlines()
    assert [line.split()[-1] for line in lines] == ["b", "Traceback", "c", "d"]
    assert lines[2] == "reward-1 | 2026-01-01T00:00:03.000Z INFO reward-1 c"
    assert shown("logs", "reward", "--run", "r").stdout == "2026-01-01T00:00:03.000Z INFO reward-1 c\n"
    assert shown("logs", "trainer", "--run", "r", "-n", "1").stdout == "2026-01-01T00:00:04.000Z INFO trainer d\n"
    assert "there is no log of trainr" in refusal("logs", "trainr", "--run", "r")
    assert "did you mean trainer?" in refusal("logs", "trainr", "--run", "r")
    assert "try: relaxd logs --run r shows those of a run" in refusal("logs", "r")
    Path(".relaxd").mkdir()
    Path(".relaxd/logs").symlink_to(folder.resolve() / "logs")  # as `relaxd run` leaves it
    assert "nothing is added to these logs" in shown("logs", "--follow").stdout


def test_what_cannot_go_on_is_said_before_services_start() -> None:
    write_run("done", steps=80, done=80, outcome=Outcome.COMPLETED, reason="completed")
    write_run("early", steps=80, done=5, outcome=Outcome.STOPPED, reason="seen enough")
    assert "run done has ended (completed): 80 of 80 steps are done" in refusal("resume", "done")
    assert "relaxd resume done --run.steps 160 lets it go on" in refusal("resume", "done")
    assert "relaxd resume early --run.steps 80 lets it go on" in refusal("resume", "early")
    assert "has done 80 steps already" in refusal("resume", "done", "--run.steps", "80")
    assert "no run that has not ended" in refusal("resume")
    assert "runs/none is not the folder of a run" in refusal("resume", "none")
    assert "run done has done 80 steps: there is no step 200" in refusal("replay", "done", "--step", "200")

    write_run("bad", steps=80, done=5, outcome=Outcome.DATA_FAILED, phase=Phase.FAILED, reason="line 2 is wrong")
    for words in (["bad"], ["bad", "--new-data"]):
        assert "services were started" in str(relaxd("resume", *words).exception)

    Path("run.toml").write_text(CONFIG.format(steps=1))
    assert "'a b' must be 1 to 64 letters" in refusal("run", "run.toml", "--run-id", "a b")
    again = refusal("run", "run.toml", "--run-id", "done")
    assert "contains an earlier run" in again
    assert "relaxd resume done --run.steps N extends it, --run-id ID names another one" in again
    Path("file").write_text("")
    assert "file is not a folder" in refusal("run", "run.toml", "--run.folder", "file")
