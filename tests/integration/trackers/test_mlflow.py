"""A run on a real MLflow server, in an environment of its own: MLflow wants an older protobuf than relaxd's.

RELAXD_TEST_MLFLOW_PYTHON names an interpreter that has mlflow; without it, the tests are skipped.
"""

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.coordinator.state.records import Evaluation
from tests.integration.trackers.conftest import Tracked
from tests.kit.ports import free_port
from tests.kit.processes import start_python
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server:
    """An MLflow server."""

    def __init__(self, python: str, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._log = folder / "mlflow.log"
        words = ("-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1")
        stores = ("--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", f"{folder}/stored")
        self._process = start_python(*words, *stores, python=python, log=self._log, cwd=folder, start_new_session=True)
        wait_until(self._is_up, "the server", 120, forgive=(OSError,), explain=self._log.read_text)

    def _is_up(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/api/2.0/{path}", timeout=20) as answer:
            return json.loads(answer.read())

    def runs(self, experiment: str) -> list[Any]:
        """Return the runs of an experiment that are not deleted."""
        found = self.get(f"mlflow/experiments/get-by-name?experiment_name={experiment}")["experiment"]
        message = json.dumps({"experiment_ids": [found["experiment_id"]]}).encode()
        request = urllib.request.Request(f"{self.url}/api/2.0/mlflow/runs/search", data=message)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=20) as answer:
            return list(json.loads(answer.read()).get("runs", []))

    def curve(self, run: Any, name: str) -> list[tuple[int, float]]:
        found = self.get(f"mlflow/metrics/get-history?run_id={run['info']['run_id']}&metric_key={name}")
        return [(int(one["step"]), one["value"]) for one in found.get("metrics", [])]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)  # with its workers
        self._process.wait(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlflow")
    python = os.environ.get("RELAXD_TEST_MLFLOW_PYTHON", "")
    if not python:
        pytest.skip("RELAXD_TEST_MLFLOW_PYTHON names no interpreter with mlflow>=3 (pip install takes minutes)")
    server = Server(python, folder)
    yield server
    server.close()


def rewards(first: int, last: int, more: float = 0.0) -> list[tuple[int, float]]:
    return [(step, step + more) for step in range(first, last + 1)]


def test_a_real_server_has_every_step_once(server: Server, tracked: Tracked) -> None:
    how = {"mlflow_url": server.url, "project": "adders", "name": "first"}
    tracked.write(1, 3)
    process = tracked.start("mlflow", **how)
    process.until("a report", process.reports)
    assert process.reports() == [{"tracker": "mlflow", "problem": ""}]
    process.process.kill()
    process.process.wait(20)
    process = tracked.start("mlflow", **how)
    tracked.write(4, 5)
    tracked.files.metrics.add(Evaluation(step=2, metrics={"eval_reward": 0.25}))
    process.end()
    (run,) = server.runs("adders")
    assert server.curve(run, "train/reward") == rewards(1, 5)
    assert server.curve(run, "eval/reward") == [(2, 0.25)]
    assert (run["info"]["run_name"], run["info"]["status"]) == ("first", "FINISHED")
    parameters = {one["key"]: one["value"] for one in run["data"]["params"]}
    assert (parameters["data.source"], parameters["run.steps"]) == ("addition", "9")
    assert "code.relaxd" in parameters
    place = run["info"]["artifact_uri"].removeprefix("mlflow-artifacts:/")
    table = server.get(f"mlflow-artifacts/artifacts/{place}/samples/step-000002.json")
    assert table["columns"] == ["prompt", "response", "reward"]
    assert table["data"] == [["p2", "<a|2>", 0.5]]

    tracked.files.metrics.rewind(3)  # Redis has lost steps 4 and 5
    tracked.files.rewind_samples(3)
    tracked.write(4, 4, reward=100.0)
    process = tracked.start("mlflow", **how)
    process.end()
    (run,) = server.runs("adders")
    assert server.curve(run, "train/reward") == rewards(1, 3) + rewards(4, 4, 100.0)


def test_a_server_that_is_away_is_a_problem_until_it_answers(tracked: Tracked) -> None:
    tracked.write(1, 1)
    url = f"http://127.0.0.1:{free_port()}"
    process = tracked.start("mlflow", mlflow_url=url)
    (report,) = process.until("a report", process.reports)
    assert f"MLflowError: {url} doesn't answer: <urlopen error [Errno 111] Connection refused>" in report["problem"]
