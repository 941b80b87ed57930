"""Commands on an existing run: watch, pause, resume, checkpoint, stop, delete, samples."""

import json
import time
from collections.abc import Mapping
from typing import Annotated

import typer

from relaxd.cli import recovery
from relaxd.cli.execute import Where, execute_again
from relaxd.cli.follow import follow
from relaxd.cli.options import (
    DEFAULT_STATE,
    ActiveRunArgument,
    CoordinatorOption,
    FolderOption,
    ReasonOption,
    RunArgument,
    RunNameArgument,
    StateOption,
    new_console,
    with_replica_options,
)
from relaxd.cli.view import samples_table
from relaxd.client.coordinator import ENDED, CoordinatorClient, state_name
from relaxd.client.errors import CliError
from relaxd.local.address import coordinator_address
from relaxd.local.state import StateFolder
from relaxd.report.result import sample_values
from relaxd.v1 import coordinator_pb2 as pb

STOPPING_SECONDS = 5.0
"""Interval at which `relaxd stop` says what the run waits for."""


def watch(run_id: RunArgument = "", state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None) -> None:
    """Watch a run until it ends; Ctrl-C only stops watching."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        try:
            follow(client, run_id, new_console())
        except KeyboardInterrupt:
            raise typer.Exit(130) from None


def pause(
    run_id: ActiveRunArgument = "",
    reason: ReasonOption = "",
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Pause a run: publish no prompts and end no step until `relaxd resume`."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        print(_state_line(client.pause_run(run_id, reason)))


@with_replica_options
def resume(
    replicas: Mapping[str, int],
    run_id: ActiveRunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Continue a run: end its pause, or start its services again after all of them died."""
    state_folder = StateFolder(state)
    if coordinator is None and not state_folder.is_up():
        if not run_id:
            raise CliError("no services are up here", "relaxd resume RUN starts them again for a run")
        where = Where(state_folder, replicas=replicas)
        execute_again(run_id, recovery.run_folder(run_id, folder), where, new_console())
        return
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        lost = folder or recovery.lost_run(client, run_id)
        if lost is not None:
            print(_state_line(client.restore_run(lost.resolve())))
        else:
            print(_state_line(client.resume_run(run_id)))


def checkpoint(
    run_id: ActiveRunArgument = "", state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None
) -> None:
    """Save a checkpoint now, without interrupting training."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        saved = client.save_checkpoint(run_id)
    print(f"step {saved.weights.version}: {saved.path}")


def stop(
    run_id: ActiveRunArgument = "",
    reason: ReasonOption = "",
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the run has ended.")] = True,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """End a run early: drop its open groups, evaluate and export the model. The services stay up."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        run = client.stop_run(run_id, reason)
        print(_state_line(run))
        if wait:
            try:
                _print_stopping(client, run.run_id)
            except KeyboardInterrupt:
                print(f"run {run.run_id} goes on stopping; relaxd watch follows it")
                raise typer.Exit(130) from None


def _print_stopping(client: CoordinatorClient, run_id: str) -> None:
    """Print what a run that is stopping waits for, until it has ended."""
    told = ("", 0.0)
    for response in client.watch(run_id):
        run, now = response.run, time.monotonic()
        if run.state in ENDED:
            print(_state_line(run))
        elif run.wait.kind == "stopping" and (run.wait.on != told[0] or now - told[1] > STOPPING_SECONDS):
            print(f"run {run_id}: {run.waiting_for}", flush=True)
            told = (run.wait.on, now)


def delete(run_id: RunNameArgument, state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None) -> None:
    """Delete an ended run from Redis, samples and ledger included. Its folder stays."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        client.delete_run(run_id)
    print(f"deleted run {run_id} from Redis")


def samples(
    run_id: RunArgument = "",
    step: Annotated[int, typer.Option(min=0, help="Show samples of this step; 0: the newest.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of samples.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show trained samples with reward, advantage and weight version."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        found = client.samples(run_id, step, limit)
    if as_json:
        for sample in found:
            print(json.dumps(sample_values(sample), ensure_ascii=False))
    elif found:
        new_console().print(samples_table(found))
    else:
        print("no samples yet: they come with the first trained step")


def _state_line(run: pb.Run) -> str:
    """Format a run's state as one line."""
    return f"run {run.run_id} is {state_name(run.state)}" + (f": {run.reason}" if run.reason else "")
