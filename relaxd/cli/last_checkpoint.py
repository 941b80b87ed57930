"""A checkpoint before the services stop, so that the run repeats no steps when it goes on."""

from collections.abc import Callable
from pathlib import Path

from relaxd.client.coordinator import CoordinatorClient
from relaxd.client.errors import CliError
from relaxd.config import RunConfig
from relaxd.local.silence import open_client
from relaxd.v1.coordinator_pb2 import RUN_STATE_PAUSED, RUN_STATE_RUNNING, Run

MAX_SECONDS = 300.0
"""Longest wait for the checkpoint; a trainer that hangs must not keep its services from being stopped."""
UNDER_WAY = (RUN_STATE_RUNNING, RUN_STATE_PAUSED)
"""States in which the trainer has weights that no checkpoint may have. A run that is stopping saves its own."""


def save_of_run_in_progress(address: str, state: Path, say: Callable[[str], None]) -> str:
    """Save a checkpoint of the run in progress at the coordinator of a state folder, if there is one.

    Returns the run's id, else "".
    """
    try:
        with open_client(address, state) as coordinator:
            run = next((run for run in coordinator.runs() if run.state in UNDER_WAY), None)
            if run is None:
                return ""
            save_last_checkpoint(coordinator, run.run_id, say)
            return run.run_id
    except CliError as error:
        say(f"no checkpoint was saved: {error}")
    except KeyboardInterrupt:
        say("no checkpoint was saved")
    return ""


def save_last_checkpoint(coordinator: CoordinatorClient, run_id: str, say: Callable[[str], None]) -> None:
    """Save a checkpoint of a run, if its configuration has checkpoints; Ctrl-C skips it. `say` is told how it went."""
    try:
        run = coordinator.run(run_id)
        if not _has_what_to_save(run):
            return
        say(f"saving a checkpoint of run {run_id} (Ctrl-C skips it)")
        saved = coordinator.save_checkpoint(run_id, rotate=True, seconds=MAX_SECONDS)
        say(f"the checkpoint of step {saved.weights.version} is on disk")
    except CliError as error:
        say(f"no checkpoint was saved: {error}; a resume repeats the steps after the last checkpoint")
    except KeyboardInterrupt:
        say("no checkpoint was saved")


def _has_what_to_save(run: Run) -> bool:
    return bool(run.step) and bool(RunConfig.model_validate_json(run.config_json).trainer.checkpoint.every)
