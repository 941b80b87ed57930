"""Commands about a run that is there: look at it, hold it, go on with it, end it."""

import json
from typing import Annotated

import typer

from relaxd.cli import recovery
from relaxd.cli.execute import Where, execute_again
from relaxd.cli.follow import follow
from relaxd.cli.options import (
    DEFAULT_STATE,
    ActiveRunArgument,
    AdvantageOption,
    CoordinatorOption,
    FolderOption,
    ReasonOption,
    RewardOption,
    RolloutOption,
    RunArgument,
    RunNameArgument,
    StateOption,
    new_console,
)
from relaxd.cli.view import samples_table
from relaxd.client.coordinator import CoordinatorClient, state_name
from relaxd.client.errors import CliError
from relaxd.local.address import coordinator_address
from relaxd.local.state import StateFolder
from relaxd.report.report import sample_values
from relaxd.v1 import coordinator_pb2 as pb


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
    """Pause a run: no more prompts, and no step ends, until `relaxd resume`."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        print(_told(client.pause_run(run_id, reason)))


def resume(
    run_id: ActiveRunArgument = "",
    folder: FolderOption = None,
    rollout: RolloutOption = 1,
    reward: RewardOption = 1,
    advantage: AdvantageOption = 1,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Go on with a run: end its pause; or bring its services up again after all of them died."""
    state_folder = StateFolder(state)
    if coordinator is None and not state_folder.is_up():
        if not run_id:
            raise CliError("no services are up here", "relaxd resume RUN brings them up again for a run")
        replicas = {"rollout": rollout, "reward": reward, "advantage": advantage}
        where = Where(state_folder, replicas=replicas)
        execute_again(run_id, recovery.run_folder(run_id, folder), where, new_console())
        return
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        lost = folder or recovery.lost_run(client, run_id)
        if lost is not None:
            print(_told(client.restore_run(lost.resolve())))
        else:
            print(_told(client.resume_run(run_id)))


def checkpoint(
    run_id: ActiveRunArgument = "", state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None
) -> None:
    """Let the trainer take a checkpoint now; training goes on meanwhile."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        saved = client.save_checkpoint(run_id)
    print(f"step {saved.weights.version}: {saved.path}")


def stop(
    run_id: ActiveRunArgument = "",
    reason: ReasonOption = "",
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """End a run early: what is open is dropped, the model is evaluated and exported. The services stay up."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        print(_told(client.stop_run(run_id, reason)))


def delete(run_id: RunNameArgument, state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None) -> None:
    """Make Redis forget a run that has ended, samples and ledger included; its folder stays."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        client.delete_run(run_id)
    print(f"Redis has forgotten run {run_id}")


def samples(
    run_id: RunArgument = "",
    step: Annotated[int, typer.Option(min=0, help="Only samples of this step; 0: the newest.")] = 0,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Most samples to show.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show what the model wrote, with reward, advantage and weight version of each sample."""
    with CoordinatorClient(coordinator_address(state, coordinator)) as client:
        found = client.samples(run_id, step, limit)
    if as_json:
        for sample in found:
            print(json.dumps(sample_values(sample), ensure_ascii=False))
    elif found:
        new_console().print(samples_table(found))
    else:
        print("no samples yet: they come with the first trained step")


def _told(run: pb.Run) -> str:
    """A run's state in a line."""
    return f"run {run.run_id} is {state_name(run.state)}" + (f": {run.reason}" if run.reason else "")
