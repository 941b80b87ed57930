"""relaxd from Python: a run on services of its own, with a reward of the test's; the same run read by others."""

import asyncio
import json
import linecache
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import relaxd
from relaxd import api
from relaxd.config.load_toml import ConfigError
from relaxd.run_folder import read_lines
from tests.e2e.conftest import CONFIG
from tests.kit.processes import ROOT
from tests.kit.waiting import wait_until


def even_bytes(sample: Any) -> float:
    data = sample.response.encode()
    return sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_is_started_iterated_and_read(folder: Path, tiny_model: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG.format(model=tiny_model, steps=3))
    config = relaxd.configure("tiny.toml", {"run.steps": 2, "rollout.temperature": 0.9, "eval.prompts": 0})
    with relaxd.run(config, reward=even_bytes, run_id="from-python") as run:
        steps = list(run.steps())
        last = run.wait()
    assert [step["step"] for step in steps] == [1, 2]
    assert all(0 < step["reward_mean"] < 1 for step in steps)
    assert last == steps[-1]
    assert run.state == "stopped"
    assert not (folder / ".relaxd" / "services.json").exists()

    assert "RELAXD_STACK" not in os.environ, "the next call may be for another stack"

    again = relaxd.open_run("from-python")
    assert [row["step"] for row in again.metrics() if row["step"]] == [1, 2]
    assert [row["step"] for row in again.ledger()] == [1, 2]
    assert {sample["step"] for sample in again.samples(limit=100)} == {1, 2}
    for sample in again.samples(limit=3):
        assert sample["reward"] == pytest.approx(even_bytes(type("Sample", (), sample)))
    assert again.frame().reward_mean.iloc[-1] == pytest.approx(last["reward_mean"])

    (config_file := run.folder / "config.json").write_text(
        json.dumps(json.loads(config_file.read_text()) | {"eval": {"prompts": 3}})
    )
    found = again.evaluate(device="cpu")
    assert (found["step"], found["eval_prompts"]) == (2, 3)
    answers = [*read_lines(next(run.folder.glob("evaluated/step-000002-*/held_out.jsonl")))]
    assert found["eval_reward"] == pytest.approx(sum(answer["reward"] for answer in answers) / 3)
    with pytest.raises(relaxd.RunError, match=r"no intact checkpoint of step 9; available steps: .*2"):
        again.evaluate(step=9)
    with pytest.raises(ValueError, match="device is 'gpu': it must be auto, cpu, cuda"):
        again.evaluate(device="gpu")

    async def collected() -> list[api.Row]:
        return [step async for step in again.asteps()]

    assert [(step["step"], step["reward_mean"]) for step in asyncio.run(collected())] == [
        (step["step"], pytest.approx(step["reward_mean"])) for step in steps
    ]


class Evens:
    """Pays the share of even bytes."""

    def step(self, reply: Any) -> tuple[None, float]:
        data = reply.text.encode()
        return None, sum(byte % 2 == 0 for byte in data) / max(len(data), 1)


@pytest.mark.night
def test_a_class_is_the_environment_of_a_run(folder: Path, tiny_model: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG.format(model=tiny_model, steps=1))
    settings = {"eval.prompts": 0, "reward.name": "environment", "agent.environment": "calculator"}
    config = relaxd.configure("tiny.toml", {**settings, "agent.max_turns": 1})
    with relaxd.run(config, environment=Evens, run_id="evens") as run:
        last = run.wait()
    assert last["turns_mean"] == 1
    assert 0 < last["environment_reward_mean"] == pytest.approx(last["reward_mean"])


def test_stop_says_what_it_waits_for(
    folder: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "tiny.toml").write_text(CONFIG.format(model=tiny_model, steps=3))
    monkeypatch.setattr(api, "NOTICE_SECONDS", 0.5)
    monkeypatch.setattr(api, "END_SECONDS", 3.0)
    child = api._Child(relaxd.configure("tiny.toml"), "hangs", {}, folder / "state")
    os.kill(child._process.pid, signal.SIGSTOP)
    stands = lambda: psutil.Process(child._process.pid).status() == psutil.STATUS_STOPPED  # noqa: E731
    wait_until(stands, "the child stands still")  # an earlier SIGINT would end it
    try:
        child.stop()
    finally:
        child._process.kill()
        child._process.wait(30)
    assert re.search(r"waiting for run hangs to end; .* \(`relaxd run`, process \d+\), for \d s now", caplog.text)
    assert "run hangs has not ended within 3 s, and goes on: `relaxd run`" in caplog.text


@pytest.mark.slow
def test_the_notebook_runs(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a tiny model: its cells are executed as Jupyter does, so that inspect finds the source of a function."""
    (folder / "addition.toml").write_text(CONFIG.format(model=tiny_model, steps=24))
    names: dict[str, Any] = {}
    for number, cell in enumerate(json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]):
        if cell["cell_type"] == "code":
            source, name = "".join(cell["source"]), f"<cell {number}>"
            linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
            exec(compile(source, name, "exec"), names)
    assert re.findall(r"^\d+ 0\.\d+|^\d+ 0", capsys.readouterr().out, re.MULTILINE)
    assert names["run"].state == "stopped"
    assert [row["step"] for row in names["run"].ledger()] == [1, 2, 3, 4]


def test_a_run_that_can_not_start_says_why(folder: Path, tiny_model: Path) -> None:
    (folder / "tiny.toml").write_text(CONFIG.format(model=tiny_model, steps=3))
    config = relaxd.configure("tiny.toml", {"reward.name": "nowhere:score"})
    with pytest.raises(relaxd.RunError, match="module nowhere cannot be imported"):
        relaxd.run(config)
    with pytest.raises(relaxd.RunError, match="has no run"):
        relaxd.open_run()
    with pytest.raises(ValueError, match="it must be a function that `def` made"):
        relaxd.run(config, reward=lambda sample: 0.0)
    with pytest.raises(ValueError, match="environment is 3: it must be a class, or a list of functions"):
        relaxd.run(config, environment=3)  # type: ignore[arg-type]


def test_a_configuration_is_made_of_mappings() -> None:
    content = {"model": {"path": "org/model"}, "data": {"source": "addition"}, "reward": {"name": "addition"}}
    config = relaxd.configure(content, {"rollout.stop": ["\n"], "run.steps": 7})
    assert (config.run.steps, config.rollout.stop, config.model.path) == (7, ("\n",), "org/model")
    with pytest.raises(ConfigError, match=re.escape("--rollout.top_q")):
        relaxd.configure(content, {"rollout.top_q": 0.5})


def test_importing_relaxd_imports_none_of_it() -> None:
    code = "import relaxd, sys; print(sorted(name for name in sys.modules if name.startswith('relaxd.')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
