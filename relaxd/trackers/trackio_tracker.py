"""Trackio, in its database on the coordinator's machine, or on the server that its environment names."""

from collections.abc import Mapping, Sequence
from typing import Any

import trackio
from trackio.sqlite_storage import SQLiteStorage

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, flatten, table_of


class TrackioTracker(Tracker):
    """Logs to a run of Trackio, whose name ends with the edition's id.

    Trackio keeps both rows of a step that is logged again. So each start begins another edition, which gets all steps
    and replaces the earlier edition. On a server or a Space the earlier edition stays.
    """

    def begins_anew(self, run: TrackedRun) -> bool:
        return True

    def start(self, run: TrackedRun, edition: Edition) -> None:
        if edition.replaced:
            SQLiteStorage.delete_run(run.project, f"{run.name}-{edition.replaced}")
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{edition.id}",
            config=flatten({**run.config, "code": run.code}),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, cells = table_of(rows)
        self._run.log({"samples": trackio.Table(columns=names, data=cells)}, step=step)

    def close(self, *, ended: bool) -> None:
        trackio.finish()
