"""The ClearML tracker with the real package: the files of an offline session, read back."""

import json
import zipfile
from typing import Any

import pytest

from services.coordinator.state.records import Evaluation
from tests.integration.trackers.conftest import Tracked

pytest.importorskip("clearml", reason="pip install relaxd[trackers]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def session(tracked: Tracked) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the task and the events of the only closed session."""
    (path,) = (tracked.folder / "clearml" / "offline").glob("offline-*.zip")
    with zipfile.ZipFile(path) as file:
        task = json.loads(file.read("task.json"))
        lines = file.read("metrics.jsonl").decode().splitlines()
    return task, [event for line in lines for event in json.loads(line)]


def test_an_offline_session_has_every_step_once(tracked: Tracked) -> None:
    how = {"clearml_mode": "offline", "project": "adders", "name": "first"}
    tracked.write(1, 2)
    process = tracked.start("clearml", **how)
    process.until("a start", process.reports)
    assert process.reports() == [{"tracker": "clearml", "problem": ""}]
    process.process.kill()
    process.process.wait(20)

    tracked.files.metrics.rewind(1)  # Redis has lost step 2
    tracked.files.rewind_samples(1)
    tracked.write(2, 3, reward=100.0)
    process = tracked.start("clearml", **how)
    tracked.files.metrics.add(Evaluation(step=2, metrics={"eval_reward": 0.25}))
    process.end()
    task, events = session(tracked)
    assert (task["project_name"], task["name"]) == ("adders", "first")
    assert 'source = "addition"' in task["configuration"]["data"]["value"]
    assert "relaxd" in task["configuration"]["code"]["value"]
    assert not task.get("script", {}).get("diff"), "no code of the trackers' process"
    curves: dict[str, list[tuple[int, float]]] = {}
    for event in events:
        if event["type"] == "training_stats_scalar":
            curves.setdefault(event["metric"], []).append((event["iter"], event["value"]))
    assert curves == {
        "train/reward": [(1, 1.0), (2, 102.0), (3, 103.0)],
        "train/loss": [(1, 0.5), (2, 0.5), (3, 0.5)],
        "eval/reward": [(2, 0.25)],
    }
    tables = [event for event in events if event["type"] == "plot"]
    assert [event["iter"] for event in tables] == [1, 2, 3]
    assert "<a|2>" in tables[1]["plot_str"]


def test_a_server_that_is_not_named_is_a_problem_of_the_tracker(tracked: Tracked) -> None:
    tracked.write(1, 1)
    process = tracked.start("clearml")
    (report,) = process.until("a report", process.reports)
    assert "clearml" in report["problem"].lower()
    assert "it is started again every 30 s" in report["problem"]
