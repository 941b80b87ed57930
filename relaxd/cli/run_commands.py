"""Commands on an existing run: pause, resume, checkpoint, stop, delete."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
from relaxd.cli.reading.follow import follow, interrupt_code
from relaxd.cli.reading.run_source import began_on_up, failed_by_data, refuse_ended
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient, state_name
from relaxd.client.folder_runs import read_run
from relaxd.local.stack import address_here, coordinator_address, open_client
from relaxd.local.state_folder import StateFolder
from relaxd.rewinding import NoWayBack, check_way_back, rewind
from relaxd.v1 import coordinator_pb2 as pb

STOPPING_SECONDS = 5.0
"""Interval between two progress lines of `relaxd stop`, in seconds."""


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
    from_step: Annotated[
        int,
        typer.Option("--from-step", min=0, help="Go back to the checkpoint of this step; later steps are set aside."),
    ] = 0,
    reset_moments: Annotated[
        bool, typer.Option("--reset-moments", help="With --from-step: start AdamW's moments anew.")
    ] = False,
    to_end: Annotated[
        bool, typer.Option("--follow", help="Follow the run until it ends, also one that runs or has ended.")
    ] = False,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for a coordinator that is starting.")
    ] = 0.0,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Continue a run: end its pause, extend it, go back, or start its services again after all of them died."""
    place = StateFolder(state)
    address = address_here(state, coordinator)
    if reset_moments and not from_step:
        raise CliError("--reset-moments needs the step after which they start anew", "relaxd resume RUN --from-step N")
    if from_step:
        _resume_from(from_step, run_id, folder, Where(place, address=address, replicas=replicas), steps, reset_moments)
        return
    if address is None:
        run_folder = (
            run_checkpoints.run_folder(run_id, folder) if run_id or folder else run_checkpoints.newest_unfinished()
        )
        execute_again(run_folder, Where(place, replicas=replicas), new_console(), steps, new_data=new_data)
        return
    with open_client(address, state) as client:
        known = {run.run_id: run for run in client.runs(patience_seconds=wait)}
        if steps and not (run_id or folder):
            raise CliError("--run.steps needs the run that it extends", f"relaxd resume RUN --run.steps {steps}")
        if new_data and not (run_id or folder):
            raise CliError("--new-data needs the run that goes on with it", "relaxd resume RUN --new-data")
        from_folder = folder or steps or new_data or (run_id and run_id not in known)
        from_folder = from_folder or (run_id and failed_by_data(known[run_id]))
        local = run_checkpoints.run_folder(run_id, folder) if from_folder else None
        if local is not None:
            refuse_ended(read_run(local), steps)
            run = client.restore_run(local, steps, new_data=new_data)
        elif to_end and run_id in known and known[run_id].state in ENDED:
            run = known[run_id]
        else:
            run = client.resume_run(run_id)
        show(_state_line(run))
        if to_end:
            try:
                follow(client, run.run_id, new_console(), old_drops=False)
            except KeyboardInterrupt as interrupt:
                raise typer.Exit(interrupt_code(interrupt)) from None


def _resume_from(step: int, run_id: str, folder: Path | None, where: Where, steps: int, reset_moments: bool) -> None:
    """Continue a run after an earlier step, on running services or newly started ones. Raises CliError."""
    if not run_id and folder is None:
        raise CliError("--from-step needs the run that goes back", f"relaxd resume RUN --from-step {step}")
    local = run_checkpoints.run_folder(run_id, folder)
    run_id = read_run(local).run_id
    with _way_back():
        check_way_back(local, step)
    if steps and steps <= step:
        raise CliError(f"--run.steps {steps}: it must be above {step}, the step to which the run goes back")

    def go_back() -> None:
        with _way_back():
            aside = rewind(local, step, reset_moments=reset_moments)
        show(f"run {run_id} goes on after step {step}; what came later is in {aside}")

    if where.address is None:
        if began_on_up(local):
            raise CliError(
                f"run {run_id} may be in the Redis of `relaxd up`: start it, so that the run can be stopped there",
                f"relaxd up, relaxd stop {run_id}, relaxd resume {run_id} --from-step {step}",
            )
        execute_again(local, where, new_console(), steps, before=go_back)
        return
    with open_client(where.address, where.folder.path) as client:
        known = {run.run_id: run for run in client.runs()}.get(run_id)
        if known is not None and known.state not in ENDED:
            raise CliError(f"run {run_id} is {state_name(known.state)}", f"relaxd stop {run_id} stops it first")
        if known is not None:
            client.delete_run(run_id)
        go_back()
        show(_state_line(client.restore_run(local, steps)))


@contextmanager
def _way_back() -> Iterator[None]:
    try:
        yield
    except NoWayBack as error:
        raise CliError(str(error), "relaxd checkpoints RUN lists them") from error


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
    """Print what a stopping run waits for until the run has ended."""
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
    """Return a line with a run's state and the reason for it."""
    return f"run {run.run_id} is {state_name(run.state)}" + (f": {run.reason}" if run.reason else "")
