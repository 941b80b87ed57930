"""MLflow, through its REST API, because its package requires an older protobuf than relaxd."""

import base64
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, flatten, table_of

CALL_SECONDS = 30.0
"""Deadline of a call to the server, in seconds."""
MAX_METRICS, MAX_PARAMETERS, MAX_VALUE = 1000, 100, 6000
"""Maximum number of metrics and of parameters in a call, and maximum characters of a parameter's value."""
EDITION_TAG = "relaxd.edition"
ARTIFACTS = "mlflow-artifacts:"
"""URI scheme of artifacts that the MLflow server itself stores."""


class MLflowError(Exception):
    """The MLflow server refused a call, or doesn't answer."""


class MLflowTracker(Tracker):
    """Logs to a run of an MLflow server: numbers, the configuration as parameters, samples as artifacts."""

    def start(self, run: TrackedRun, edition: Edition) -> None:
        self._url = run.settings["mlflow_url"].rstrip("/")
        self._numbers: list[dict[str, Any]] = []
        experiment = self._experiment(run.project)
        if edition.replaced and (replaced := self._find(experiment, edition.replaced)) is not None:
            self._call("runs/delete", {"run_id": replaced["info"]["run_id"]})
        known = self._find(experiment, edition.id)
        found = known or self._create(experiment, run, edition)
        self._id, self._artifacts = found["info"]["run_id"], found["info"]["artifact_uri"]
        self._call("runs/update", {"run_id": self._id, "status": "RUNNING"})
        if known is None:
            self._log_parameters(flatten({**run.config, "code": run.code}))

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        for name, value in numbers.items():
            key = re.sub(r"[^\w\-. /]", "_", name)
            self._numbers.append({"key": key, "value": value, "timestamp": now, "step": step})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Upload samples as a table, if the server stores artifacts."""
        if not self._artifacts.startswith(ARTIFACTS):
            return
        names, cells = table_of(rows)
        table = {"columns": names, "data": cells}
        path = f"{urllib.parse.urlsplit(self._artifacts).path.strip('/')}/samples/step-{step:06d}.json"
        self._send("PUT", f"api/2.0/mlflow-artifacts/artifacts/{urllib.parse.quote(path)}", table)

    def flush(self) -> None:
        for numbers in _portions(self._numbers, MAX_METRICS):
            self._call("runs/log-batch", {"run_id": self._id, "metrics": numbers})
        self._numbers = []

    def close(self, *, ended: bool) -> None:
        if ended:
            self._call("runs/update", {"run_id": self._id, "status": "FINISHED", "end_time": int(time.time() * 1000)})

    def _experiment(self, name: str) -> str:
        try:
            found = self._send(
                "GET", "api/2.0/mlflow/experiments/get-by-name?" + urllib.parse.urlencode({"experiment_name": name})
            )
        except MLflowError as error:
            if "RESOURCE_DOES_NOT_EXIST" not in str(error):
                raise
            return str(self._call("experiments/create", {"name": name})["experiment_id"])
        return str(found["experiment"]["experiment_id"])

    def _find(self, experiment: str, edition: str) -> dict[str, Any] | None:
        """Return the MLflow run that has the edition's tag; None if there is none."""
        wanted = {"experiment_ids": [experiment], "filter": f"tags.`{EDITION_TAG}` = '{edition}'", "max_results": 1}
        return next(iter(self._call("runs/search", wanted).get("runs", [])), None)

    def _create(self, experiment: str, run: TrackedRun, edition: Edition) -> dict[str, Any]:
        tags = {EDITION_TAG: edition.id, "relaxd.run_id": run.run_id}
        if "commit" in run.code:
            tags["mlflow.source.git.commit"] = run.code["commit"]
        new = {
            "experiment_id": experiment,
            "run_name": run.name,
            "start_time": int(time.time() * 1000),
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
        }
        return dict(self._call("runs/create", new)["run"])

    def _log_parameters(self, values: Mapping[str, Any]) -> None:
        texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
        parameters = [
            {"key": re.sub(r"[^\w\-. /]", "_", name), "value": text[:MAX_VALUE]} for name, text in texts.items() if text
        ]
        for portion in _portions(parameters, MAX_PARAMETERS):
            self._call("runs/log-batch", {"run_id": self._id, "params": portion})

    def _call(self, method: str, message: Mapping[str, Any]) -> dict[str, Any]:
        return self._send("POST", f"api/2.0/mlflow/{method}", message)

    def _send(self, verb: str, path: str, message: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to the MLflow server and return its JSON answer. Raises MLflowError."""
        data = None if message is None else json.dumps(message).encode()
        headers = {"Content-Type": "application/json", **_authorization()}
        request = urllib.request.Request(f"{self._url}/{path}", data=data, headers=headers, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
                return dict(json.loads(answer.read() or b"{}"))
        except urllib.error.HTTPError as error:
            raise MLflowError(
                f"{self._url} answers {error.code}: {error.read(1000).decode(errors='replace')}"
            ) from error
        except (OSError, ValueError) as error:
            raise MLflowError(f"{self._url} doesn't answer: {error}") from error


def _authorization() -> dict[str, str]:
    """Return an Authorization header with the credentials from the environment, if there are any."""
    if token := os.environ.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    if user := os.environ.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    return {}


def _portions(items: Sequence[dict[str, Any]], size: int) -> Iterator[Sequence[dict[str, Any]]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
