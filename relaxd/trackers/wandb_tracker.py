"""Weights & Biases, online or in files of the run's folder wandb/ (tracking.wandb_mode)."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from relaxd.trackers.tracker import Edition, TrackedRun, Tracker, table_of

FOLDER = "wandb"
"""Folder of the W&B files in the run's folder."""


class WandbTracker(Tracker):
    """Logs to a run of W&B. The x axis of every curve is the number `step`.

    W&B can't overwrite rows, so each edition is a separate run. Offline, the folder has only the last edition, which
    each start writes anew.
    """

    def begins_anew(self, run: TrackedRun) -> bool:
        return _is_offline(run)

    def start(self, run: TrackedRun, edition: Edition) -> None:
        if _is_offline(run):
            shutil.rmtree(run.folder / FOLDER, ignore_errors=True)
        self._run = wandb.init(
            dir=str(run.folder),
            id=f"{run.run_id}-{edition.id}",
            name=run.name,
            notes=f"replaces {run.run_id}-{edition.replaced}: its steps were trained again"
            if edition.replaced
            else None,
            project=run.project,
            entity=run.settings["wandb_entity"] or None,
            config={**run.config, "code": dict(run.code)},
            mode=run.settings["wandb_mode"],
            resume=None if _is_offline(run) else "allow",
            settings=wandb.Settings(console="off", disable_git=True, save_code=False, quiet=True),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log_step(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def log_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        names, cells = table_of(rows)
        self._run.log({"step": step, "samples": wandb.Table(columns=[*names], data=cells)})

    def close(self, *, ended: bool) -> None:
        self._run.finish()


def _is_offline(run: TrackedRun) -> bool:
    return bool(run.settings["wandb_mode"] == "offline")
