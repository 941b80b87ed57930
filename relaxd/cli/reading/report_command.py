"""`relaxd report`: summarise a running or finished run, or a run's folder."""

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.reading.source import open_run
from relaxd.report.report import write_report
from relaxd.report.result import read_result
from relaxd.report.step_times import tables


def report(
    run_id: RunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show where a run's time went, and rewrite its report.html and curve.png. Works during a run and afterwards."""
    console = new_console()
    with open_run(run_id, folder, state, coordinator) as source:
        found = source.folder
        result = read_result(found)
        console.print(f"run {result.run_id}: {result.state}, {len(result.steps)} steps")
        for table in tables(result.steps):
            console.print(table)
        if not result.steps:
            console.print("no step has ended yet")
        console.print(f"report   {write_report(found)}", soft_wrap=True)
