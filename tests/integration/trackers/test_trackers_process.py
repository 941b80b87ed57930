"""The trackers' process with the real packages, whose files are read back with TensorBoard's reader and W&B's proto."""

import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from services.coordinator.runs.tracking import _BOOTSTRAP
from services.coordinator.state.records import Evaluation
from tests.integration.trackers.conftest import Tracked, read_wandb

pytest.importorskip("tensorboard", reason="pip install relaxd[trackers]")
pytest.importorskip("wandb", reason="pip install relaxd[trackers]")


def events(folder: Path) -> Any:
    """Return TensorBoard's reading of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    if not (folder / "tensorboard").is_dir():
        return []
    read = events(folder)
    return [(event.step, event.value) for event in read.Scalars(tag)] if tag in read.Tags()["scalars"] else []


def rewards(first: int, last: int, more: float = 0.0) -> list[tuple[int, float]]:
    return [(step, step + more) for step in range(first, last + 1)]


def test_tensorboard_reads_what_was_written(tracked: Tracked) -> None:
    tracked.write(1, 3)
    process = tracked.start("tensorboard")
    process.until("three steps", lambda: len(curve(tracked.folder, "train/reward")) == 3)
    tracked.write(4, 4)
    tracked.files.metrics.add(Evaluation(step=2, metrics={"eval_reward": 0.25, "eval/gsm8k/reward": 0.5}))
    process.end()
    read = events(tracked.folder)
    assert curve(tracked.folder, "train/reward") == rewards(1, 4)
    assert curve(tracked.folder, "eval/reward") == [(2, 0.25)]
    assert curve(tracked.folder, "eval/gsm8k/reward") == [(2, 0.5)]
    assert sorted(read.Tags()["scalars"]) == ["eval/gsm8k/reward", "eval/reward", "train/loss", "train/reward"]
    samples = [(event.step, event.tensor_proto.string_val[0].decode()) for event in read.Tensors("samples")]
    assert [step for step, _ in samples] == [1, 2, 3, 4]
    assert samples[0][1].splitlines()[2] == "| p1 | &lt;a&#124;1> | 0.5 |"
    config = read.Tensors("config")[0].tensor_proto.string_val[0].decode()
    assert '"source": "addition"' in config
    assert process.reports() == [{"tracker": "tensorboard", "problem": ""}]


def test_curves_of_tensorboard_do_not_fork_when_steps_are_trained_again(tracked: Tracked) -> None:
    tracked.write(1, 5)
    process = tracked.start("tensorboard")
    process.until("five steps", lambda: len(curve(tracked.folder, "train/reward")) == 5)
    before = events(tracked.folder)  # a TensorBoard that runs
    process.process.kill()
    process.process.wait(20)
    process = tracked.start("tensorboard")  # goes on after step 5
    tracked.write(6, 6)
    process.until("step 6", lambda: curve(tracked.folder, "train/reward") == rewards(1, 6))
    tracked.files.metrics.rewind(3)
    tracked.files.rewind_samples(3)
    tracked.write(4, 7, reward=100.0)
    process.end()
    assert curve(tracked.folder, "train/reward") == rewards(1, 3) + rewards(4, 7, 100.0)
    running = [(event.step, event.value) for event in before.Reload().Scalars("train/reward")]
    assert running == rewards(1, 3) + rewards(4, 7, 100.0)


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the only offline run."""
    (path,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    found = [record.history for record in read_wandb(path) if record.HasField("history")]
    rows = [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in one.item} for one in found]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def test_wandb_offline_files_have_every_step_once(tracked: Tracked) -> None:
    tracked.write(1, 2)
    process = tracked.start("wandb", wandb_mode="offline", project="adders", name="first")
    process.until("a start", lambda: {"tracker": "wandb", "problem": ""} in process.reports())
    process.process.kill()
    process.process.wait(20)
    process = tracked.start("wandb", wandb_mode="offline", project="adders", name="first")
    tracked.write(3, 3)
    tracked.files.metrics.add(Evaluation(step=2, metrics={"eval_reward": 0.25}))
    process.end()
    rows = wandb_rows(tracked.folder)
    assert [(row["step"], row["train/reward"]) for row in rows if "train/reward" in row] == rewards(1, 3)
    assert [(row["step"], row["eval/reward"]) for row in rows if "eval/reward" in row] == [(2, 0.25)]
    assert [row["step"] for row in rows if "samples/path" in row] == [1, 2, 3]
    (path,) = (tracked.folder / "wandb").glob("offline-run-*/run-*.wandb")
    records = read_wandb(path)
    (run,) = [record.run for record in records if record.HasField("run")]
    assert (run.project, run.display_name) == ("adders", "first")
    config = {update.key: json.loads(update.value_json) for update in run.config.update}
    assert config["data"]["source"] == "addition"
    assert "relaxd" in config["code"]
    axes = [(record.metric.glob_name, record.metric.step_metric) for record in records if record.HasField("metric")]
    assert ("*", "step") in axes


OWN = """
import os, time
from relaxd.trackers.tracker import Tracker

class Own(Tracker):
    def start(self, run, edition):
        print("what a tracker prints is no report")
        self.file = open(run.settings["options"]["file"], "a")

    def log_step(self, step, numbers):
        if step == 2 and not os.path.exists("repaired"):
            raise RuntimeError("broken at step 2")
        print(step, numbers["train/reward"], file=self.file, flush=True)

class Stuck(Own):
    def start(self, run, edition):
        time.sleep(1000)
"""


def test_one_tracker_that_hangs_and_one_that_fails_hold_no_other_up(tracked: Tracked, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own, stuck = f"{tmp_path}/own.py:Own", f"{tmp_path}/own.py:Stuck"
    tracked.write(1, 3)
    process = tracked.start(stuck, own, "tensorboard", options={"file": str(tmp_path / "steps")})
    process.until("three steps", lambda: len(curve(tracked.folder, "train/reward")) == 3)
    report = process.until("a report", lambda: [one for one in process.reports() if one["tracker"] == own])
    assert report[-1]["problem"] == (
        "RuntimeError: broken at step 2 (own.py:12, in log_step); it is started again every 30 s"
    )
    assert (tmp_path / "steps").read_text() == "1 1.0\n"
    assert not any(one["tracker"] == stuck for one in process.reports())


def test_the_example_writes_a_line_for_each_step(tracked: Tracked, tmp_path: Path) -> None:
    tracked.files.metrics.append((step, {"reward_mean": step / 4}) for step in (1, 2))
    example = str(Path(__file__).parents[3] / "examples" / "own_tracker.py:CsvTracker")
    process = tracked.start(example, options={"file": str(tmp_path / "rewards.csv")})
    process.end()
    assert (tmp_path / "rewards.csv").read_text() == "1,0.25\n2,0.5\n"


def test_the_process_ends_with_its_parent(tracked: Tracked) -> None:
    tracked.write(1, 3)
    process = tracked.start("tensorboard")
    assert process.process.stdin is not None
    process.process.stdin.close()
    assert process.process.wait(60) == 0
    assert curve(tracked.folder, "train/reward") == rewards(1, 3)


def test_another_interpreter_needs_only_the_tracker(tracked: Tracked, tmp_path: Path) -> None:
    """It has neither grpc nor pydantic, and no path to where this interpreter has them."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (tmp_path / "own.py").write_text(OWN)
    tracked.write(1, 1)
    tracking = {"trackers": [f"{tmp_path}/own.py:Own"], "options": {"file": str(tmp_path / "steps")}}
    tracking |= {"name": "", "project": "p", "samples": True}
    given = {"run_id": "r", "folder": str(tracked.folder), "tracking": tracking}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(python), "-c", _BOOTSTRAP],
        input=json.dumps(given) + "\nend\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, (tmp_path / "steps").read_text()) == (0, "1 1.0\n"), done.stderr
    missing = subprocess.run([str(python), "-c", "import pydantic"], capture_output=True, env=environment, timeout=60)
    assert missing.returncode == 1


def test_a_tracker_without_its_package_says_what_to_install(tracked: Tracked, tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError(\"No module named 'wandb'\")")
    tracking = {"trackers": ["wandb"], "name": "", "project": "p", "samples": True, "wandb_mode": "offline"}
    given = {"run_id": "r", "folder": str(tracked.folder), "tracking": tracking}
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path.cwd()}"}
    process = subprocess.Popen(
        [sys.executable, "-m", "relaxd.trackers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(given) + "\n")
        process.stdin.flush()
        problem = json.loads(process.stdout.readline())["problem"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(20)
    assert "No module named 'wandb': \"pip install relaxd[trackers]\", or set tracking.python to" in problem
