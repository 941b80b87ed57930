"""Commands on an existing run: pause, resume, checkpoint, stop, delete."""

import time
from collections.abc import Mapping
from typing import Annotated

import typer

from relaxd.cli import run_checkpoints
from relaxd.cli.execute import Where, execute_again
from relaxd.cli.options import (
    DEFAULT_STATE,
    ActiveRunArgument,
    CoordinatorOption,
    FolderOption,
    ReasonOption,
    ResumedRunArgument,
    RunNameArgument,
    StateOption,
    new_console,
    with_replica_options,
)
from relaxd.cli.output import show
from relaxd.cli.reading.run_source import failed_by_data, refuse_ended
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient, state_name
from relaxd.client.folder_runs import read_run
from relaxd.local.silence import open_client
from relaxd.local.stack import address_here, coordinator_address
from relaxd.local.state_folder import StateFolder
from relaxd.v1 import coordinator_pb2 as pb

STOPPING_SECONDS = 5.0
"""Interval at which `relaxd stop` says what the run waits for."""


def pause(
    run_id: ActiveRunArgument = "",
    reason: ReasonOption = "",
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Pause a run: publish no prompts and end no step until `relaxd resume`."""
    with open_client(coordinator_address(state, coordinator), state) as client:
        show(_state_line(client.pause_run(run_id, reason)))


@with_replica_options
def resume(
    replicas: Mapping[str, int],
    run_id: ResumedRunArgument = "",
    steps: Annotated[
        int, typer.Option("--run.steps", min=0, help="New number of steps, to extend the run; 0: as it is.")
    ] = 0,
    new_data: Annotated[
        bool, typer.Option("--new-data", help="Accept changed prompts, as after a repair: go on with the next epoch.")
    ] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Continue a run: end its pause, extend it, or start its services again after all of them died."""
    place = StateFolder(state)
    address = address_here(state, coordinator)
    if address is None:
        run_folder = (
            run_checkpoints.run_folder(run_id, folder) if run_id or folder else run_checkpoints.newest_unfinished()
        )
        execute_again(run_folder, Where(place, replicas=replicas), new_console(), steps, new_data=new_data)
        return
    with open_client(address, state) as client:
        known = {run.run_id: run for run in client.runs()}
        if steps and not (run_id or folder):
            raise CliError("--run.steps needs the run that it extends", f"relaxd resume RUN --run.steps {steps}")
        if new_data and not (run_id or folder):
            raise CliError("--new-data needs the run that goes on with it", "relaxd resume RUN --new-data")
        from_folder = folder or steps or new_data or (run_id and run_id not in known)
        from_folder = from_folder or (run_id and failed_by_data(known[run_id]))
        local = run_checkpoints.run_folder(run_id, folder) if from_folder else None
        if local is None:
            show(_state_line(client.resume_run(run_id)))
            return
        refuse_ended(read_run(local), steps)
        show(_state_line(client.restore_run(local, steps, new_data=new_data)))


def checkpoint(
    run_id: ActiveRunArgument = "", state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None
) -> None:
    """Save a checkpoint now, without interrupting training. It is kept until you remove it."""
    with open_client(coordinator_address(state, coordinator), state) as client:
        saved = client.save_checkpoint(run_id)
    show(f"step {saved.weights.version}: {saved.path}")


def stop(
    run_id: ActiveRunArgument = "",
    reason: ReasonOption = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")] = True,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """End a run early: drop its open groups, save a checkpoint, evaluate, export the model. The services stay up."""
    with open_client(coordinator_address(state, coordinator), state) as client:
        run = client.stop_run(run_id, reason)
        show(_state_line(run))
        if wait:
            try:
                _print_stopping(client, run.run_id)
            except KeyboardInterrupt:
                show(f"run {run.run_id} goes on stopping; relaxd watch follows it")
                raise typer.Exit(130) from None


def _print_stopping(client: CoordinatorClient, run_id: str) -> None:
    """Print what a run that is stopping waits for, until it has ended."""
    told = ("", 0.0)
    for response in client.watch(run_id):
        run, now = response.run, time.monotonic()
        if run.state in ENDED:
            show(_state_line(run))
        elif run.wait.kind == pb.WAIT_KIND_STOPPING and (run.wait.on != told[0] or now - told[1] > STOPPING_SECONDS):
            show(f"run {run_id}: {run.waiting_for}", flush=True)
            told = (run.wait.on, now)


def delete(run_id: RunNameArgument, state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None) -> None:
    """Delete an ended run from Redis, samples and ledger included. Its folder stays."""
    with open_client(coordinator_address(state, coordinator), state) as client:
        client.delete_run(run_id)
    show(f"deleted run {run_id} from Redis")


def _state_line(run: pb.Run) -> str:
    """Format a run's state as one line."""
    return f"run {run.run_id} is {state_name(run.state)}" + (f": {run.reason}" if run.reason else "")
