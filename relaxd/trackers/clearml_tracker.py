"""ClearML, on its server or in files of the run's folder clearml/ (tracking.clearml_mode)."""

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from clearml import Task

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, table_of

FOLDER = "clearml"
"""Name of ClearML's folder in the run's folder.

Its subfolder offline has the session, and later the closed session's zip file.
"""
DETECTED = (
    *("matplotlib", "tensorflow", "tensorboard", "pytorch", "xgboost", "scikit", "fastai", "lightgbm", "hydra"),
    *("detect_repository", "tfdefines", "joblib", "megengine", "catboost", "gradio"),
)
"""Frameworks and code that ClearML would record automatically, including other trackers' numbers.

All are turned off.
"""


class ClearMLTracker(Tracker):
    """Logs to a task of ClearML. A number logged again for the same step replaces the earlier number.

    Each edition is a separate task, with the edition's id as a tag. Offline, the folder has only the last edition,
    which each start writes anew.
    """

    def begins_anew(self, run: TrackedRun) -> bool:
        return _is_offline(run)

    def start(self, run: TrackedRun, edition: Edition) -> None:
        offline = _is_offline(run)
        if offline:
            shutil.rmtree(run.folder / FOLDER, ignore_errors=True)
            os.environ["CLEARML_CACHE_DIR"] = str(run.folder / FOLDER)
        # Threads, not a forked process, which would outlive this one when it is killed, with its locks.
        Task._report_subprocess_enabled = False  # type: ignore[assignment]
        Task.set_offline(offline)
        known: list[Task] = Task.get_tasks(project_name=run.project, tags=[edition.id]) if edition.resumed else []
        self._task: Task = Task.init(
            project_name=run.project,
            task_name=run.name,
            tags=[edition.id],
            reuse_last_task_id=known[0].id if known else False,
            continue_last_task=0 if known else False,  # steps keep their numbers
            auto_connect_frameworks=dict.fromkeys(DETECTED, False),
            auto_connect_arg_parser=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        if not known:
            for name, values in run.config.items():
                self._task.connect_configuration(dict(values), name=name)
            self._task.connect_configuration(dict(run.code), name="code")
        if edition.replaced:
            self._task.set_comment(f"replaces the task with the tag {edition.replaced}: its steps were trained again")

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        logger = self._task.get_logger()
        for name, value in numbers.items():
            logger.report_scalar(title=name, series=name, value=value, iteration=step)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, cells = table_of(rows)
        self._task.get_logger().report_table("samples", "samples", iteration=step, table_plot=[names, *cells])

    def flush(self) -> None:
        self._task.flush(wait_for_uploads=True)

    def close(self, *, ended: bool) -> None:
        self._task.close()


def _is_offline(run: TrackedRun) -> bool:
    return bool(run.settings["clearml_mode"] == "offline")
