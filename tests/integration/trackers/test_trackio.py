"""The Trackio tracker with the real package, in an interpreter of its own: Trackio wants an older Pillow than relaxd's.

RELAXD_TEST_TRACKIO_PYTHON names an interpreter that has trackio; without it, the test is skipped.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.coordinator.state.records import Evaluation
from tests.integration.trackers.conftest import Tracked
from tests.kit.processes import run_python

pytestmark = [pytest.mark.night, pytest.mark.timeout(600)]

READ = """
import json
from trackio.sqlite_storage import SQLiteStorage as stored

runs = stored.get_runs("adders")
print(json.dumps({run: [stored.get_run_config("adders", run), stored.get_logs("adders", run)] for run in runs}))
"""


@pytest.fixture
def python() -> str:
    if not (found := os.environ.get("RELAXD_TEST_TRACKIO_PYTHON", "")):
        pytest.skip("RELAXD_TEST_TRACKIO_PYTHON names no interpreter with trackio")
    return found


def runs(python: str, folder: Path) -> dict[str, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Return configuration and logs of the project's runs."""
    done = run_python("-c", READ, python=python, environment={"TRACKIO_DIR": str(folder / "trackio")})
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_its_database_has_every_step_once(tracked: Tracked, python: str) -> None:
    how = {"project": "adders", "name": "first", "python": python}
    tracked.write(1, 2)
    process = tracked.start("trackio", **how)
    process.until("a start", process.reports)
    assert process.reports() == [{"tracker": "trackio", "problem": ""}]
    process.process.kill()
    process.process.wait(20)

    tracked.files.metrics.rewind(1)  # Redis has lost step 2
    tracked.files.rewind_samples(1)
    tracked.write(2, 3, reward=100.0)
    process = tracked.start("trackio", **how)
    tracked.files.metrics.add(Evaluation(step=2, metrics={"eval_reward": 0.25}))
    process.end()
    tracked.write(4, 4)  # after a restart
    tracked.start("trackio", **how).end()
    ((name, (config, logs)),) = runs(python, tracked.folder).items()
    assert name.startswith("first-")
    assert config["data.source"] == "addition"
    assert "code.relaxd" in config
    rewards = [(one["step"], one["train/reward"]) for one in logs if "train/reward" in one]
    assert sorted(rewards) == [(1, 1.0), (2, 102.0), (3, 103.0), (4, 4.0)]
    assert [(one["step"], one["eval/reward"]) for one in logs if "eval/reward" in one] == [(2, 0.25)]
    assert sorted(one["step"] for one in logs if "samples" in one) == [1, 2, 3, 4]
