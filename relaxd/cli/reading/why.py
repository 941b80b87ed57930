"""`relaxd why`: what a run waits for, the numbers behind that, and what to do."""

from pathlib import Path

from rich.console import Console

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.reading.source import open_run
from relaxd.client.coordinator import ENDED as RUN_ENDED
from relaxd.client.coordinator import state_name
from relaxd.drop_reasons import drop_warnings
from relaxd.run_folder import holder_of
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import duration


def why(
    run_id: RunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Say what a run waits for, with the numbers, and what to do."""
    with open_run(run_id, folder, state, coordinator) as source:
        run = source.run
        if not source.address and run.state not in RUN_ENDED:
            there = holder_of(Path(run.folder))
            run.waiting_for = f"it belongs to another coordinator (stack {there})" if there else "it waits for services"
            run.waiting_for += f"; it is paused: {run.reason}" if run.reason else ""
        print_why(run, new_console())


def print_why(run: pb.Run, console: Console) -> None:
    """Print the sentence, the evidence and the advice."""

    def say(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    name = f"run {run.run_id} ({state_name(run.state)}, step {run.step} of {run.steps})"
    if run.state in RUN_ENDED:
        say(f"{name} waits for nothing: it has ended{f': {run.reason}' if run.reason else ''}")
        return
    say(f"{name}: {run.waiting_for or 'nothing holds it up'}", style="bold")
    if run.wait.on or run.wait.HasField("start_time"):
        since = run.wait.start_time.ToDatetime().astimezone()
        say(f"  since {since:%H:%M:%S}" + (f", because of {run.wait.on}" if run.wait.on else ""))
    if run.HasField("remaining_seconds"):
        say(f"  about {duration(run.remaining_seconds)} are left, once it goes on" if run.waiting_for else
            f"  about {duration(run.remaining_seconds)} are left")  # fmt: skip
    for title, lines in (
        ("what is known", run.wait.evidence),
        ("alarms", [f"since step {alarm.first_step}: {alarm.text}" for alarm in run.alarms]),
        ("dropped groups", drop_warnings(run.groups.dropped_by_reason, run.groups.published)),
        ("what to do", run.wait.advice or (["nothing: it goes on by itself"] if run.wait.kind else [])),
    ):
        if lines:
            say(f"{title}:")
            for line in lines:
                say(f"  {line}")
