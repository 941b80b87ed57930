"""Runs read from their folders, with the coordinator client's calls, so that commands work without services."""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict

from relaxd.client import CliError, NotFoundError
from relaxd.client.coordinator_client import CoordinatorClient
from relaxd.client.metric_series import read_series
from relaxd.run_folder import (
    CONFIG,
    METRICS,
    RECORD,
    SUMMARY,
    all_samples_file,
    is_run,
    newest_lines,
    newest_samples,
    read_all_samples,
    read_lines,
)
from relaxd.v1 import coordinator_pb2 as pb

ENDED_PHASES = ("STOPPED", "FAILED")


class FolderRuns:
    """Reads runs from their folders, in the state that was written there last."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [folder for folder in folders if is_run(folder)]

    @classmethod
    def below(cls, parent: Path) -> "FolderRuns":
        """Read the runs in the folders below `parent`, such as runs/."""
        return cls(sorted(parent.iterdir()) if parent.is_dir() else [])

    def folder(self, run_id: str = "") -> Path:
        """Return the folder of a run, by default the newest. Raises CliError."""
        return Path(self.run(run_id).folder)

    def run(self, run_id: str = "") -> pb.Run:
        """Return a run, by default the newest. Raises NotFoundError, and CliError: its files are damaged."""
        for run in self.runs():
            if run_id in ("", run.run_id):
                return run
        raise NotFoundError(f"there is no run {run_id}" if run_id else "there is no run yet", self.hint(run_id))

    def hint(self, run_id: str) -> str:
        """Return a hint for a wrong run id: similar ids, and the command that lists runs."""
        names = [folder.name for folder in self._folders]
        begun = [name for name in names if run_id and name.startswith(run_id)]
        near = begun[-1:] or difflib.get_close_matches(run_id, names, n=1)
        return "".join(f"did you mean {name}? " for name in near) + "relaxd runs lists them"

    def runs(self) -> Iterator[pb.Run]:
        """Yield all runs, newest first."""
        yield from sorted(map(read_run, self._folders), key=lambda run: run.create_time.ToNanoseconds(), reverse=True)

    def samples(
        self, run_id: str = "", step: int = 0, limit: int = 16, *, patience_seconds: float = 0.0
    ) -> list[pb.TrainedSample]:
        """Return trained samples, newest first, or all samples of a step if they were kept."""
        folder = self.folder(run_id)
        if all_samples_file(folder, step).is_file():
            found = read_all_samples(folder, step)
        else:
            found = (line for line in newest_samples(folder) if step in (0, line.get("step")))
        return [read_sample(line) for line in islice(found, limit)]

    def series(self, request: pb.GetMetricsRequest) -> list[pb.MetricSeries]:
        """Return the requested metrics of a run's steps, as series."""
        return read_series(self.folder(request.run_id), request)

    def watch(
        self,
        run_id: str = "",
        while_away: Callable[[str], None] = lambda reason: None,
        away_seconds: float = 0.0,
        after_step: int | None = None,
    ) -> Iterator[pb.WatchRunResponse]:
        """Yield one update with the whole run. No more updates follow, because no service works on the run."""
        run = self.run(run_id)
        response = pb.WatchRunResponse(run=run)
        for line in step_lines(Path(run.folder)):
            response.steps.add(step=line["step"], metrics=_numbers(line))
        yield response


RunReader = CoordinatorClient | FolderRuns
"""Type of objects from which commands read runs: a coordinator's client, or runs' folders."""


def read_sample(line: Mapping[str, Any]) -> pb.TrainedSample:
    """Convert a line of a samples file to a sample. Leaves out reward parts that are null: they weren't finite."""
    parts = {name: value for name, value in (line.get("reward_parts") or {}).items() if value is not None}
    return ParseDict({**line, "reward_parts": parts}, pb.TrainedSample(), ignore_unknown_fields=True)


def step_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of a run's steps, in order, without the evaluation before the first step."""
    return (line for line in read_lines(folder / METRICS) if line.get("step", 0) > 0)


def read_run(folder: Path) -> pb.Run:
    """Read a run from its folder. Raises CliError when its files are damaged."""
    try:
        record = json.loads((folder / RECORD).read_text())
        summary = json.loads((folder / SUMMARY).read_text()) if (folder / SUMMARY).is_file() else {}
        config_json = (folder / CONFIG).read_text()
        phase, paused = record["phase"], record.get("paused")
        run = pb.Run(
            run_id=record["run_id"],
            state=pb.RunState.Value(f"RUN_STATE_{_state(record)}"),
            outcome=pb.RunOutcome.Value(f"RUN_OUTCOME_{record.get('outcome') or 'UNSPECIFIED'}"),
            reason=record.get("reason", "") if paused is None else paused,
            steps=json.loads(config_json)["run"]["steps"],
            folder=str(folder.resolve()),
            config_json=config_json,
        )
        run.create_time.FromDatetime(datetime.fromisoformat(record["create_time"]))
        if phase in ENDED_PHASES and record.get("end_time"):
            run.end_time.FromDatetime(datetime.fromisoformat(record["end_time"]))
        last = next(newest_lines(folder / METRICS), {})
        run.step = last.get("step", 0)
        run.metrics.update(_numbers(last))
        for evaluation in record.get("evaluations", ()):
            run.metrics.update({**evaluation["metrics"], "eval_step": evaluation["step"]})
        if phase in ENDED_PHASES:
            run.groups.published, run.groups.open = summary.get("published", 0), summary.get("in_flight", 0)
            run.groups.trained, run.groups.dropped = summary.get("trained", 0), summary.get("dropped", 0)
            run.groups.dropped_by_reason.update(summary.get("dropped_by_reason", {}))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(f"{folder} is not the folder of a run: {error!r}") from error
    return run


def _state(record: dict[str, Any]) -> str:
    """Return the name of a run's state, as it is shown to people, from the content of run.json."""
    phase = str(record["phase"])
    if record.get("stop_reason") and phase not in ENDED_PHASES:
        return "STOPPING"
    return "PAUSED" if record.get("paused") is not None and phase in ("PENDING", "RUNNING") else phase


def _numbers(line: dict[str, Any]) -> dict[str, float]:
    """Return the metrics in a line of metrics.jsonl, without those that are null because they were NaN."""
    return {name: float(value) for name, value in line.items() if isinstance(value, int | float) and name != "step"}
