"""`relaxd report`: summarise a running or finished run, or a run's folder."""

from pathlib import Path

from relaxd.cli.execute import REPORT_SAMPLES
from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.client.coordinator import CoordinatorClient
from relaxd.client.errors import CliError
from relaxd.local.address import coordinator_address
from relaxd.report.report import write_report
from relaxd.report.result import SUMMARY, read_result, save_samples
from relaxd.report.step_times import tables


def report(
    run_id: RunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show where a run's time went, and rewrite its report.html and curve.png. Works during a run and afterwards."""
    console = new_console()
    found = local_folder(run_id, folder)
    if found is None or not (found / SUMMARY).is_file():  # still running, or known only to the coordinator
        try:
            with CoordinatorClient(coordinator_address(state, coordinator)) as client:
                run = client.run(found.name if found is not None else run_id)
                samples = client.samples(run.run_id, limit=REPORT_SAMPLES)
        except CliError as error:
            if found is None:
                raise
            console.print(f"without samples: {error}", style="dim", soft_wrap=True)
        else:
            found = found or Path(run.folder)
            if not found.is_dir():
                raise CliError(
                    f"the files of run {run.run_id} are on the coordinator's machine, in {found}",
                    "run relaxd report there, or on a copy: --folder DIR",
                )
            save_samples(found, samples)
    result = read_result(found)
    console.print(f"run {result.run_id}: {result.state}, {len(result.steps)} steps")
    for table in tables(result.steps):
        console.print(table)
    if not result.steps:
        console.print("no step has ended yet")
    console.print(f"report   {write_report(found)}", soft_wrap=True)


def local_folder(run_id: str, folder: Path | None) -> Path | None:
    """Return `folder`, or RUN or runs/RUN if that is a run's folder; None if the coordinator must be asked."""
    if folder is not None:
        if not folder.is_dir():
            raise CliError(f"{folder} is not a folder", "--folder DIR names a run's folder")
        return folder.resolve()
    if run_id:
        for path in (Path(run_id), Path("runs") / run_id):
            if (path / "metrics.jsonl").is_file():
                return path.resolve()
    return None
