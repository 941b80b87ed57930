"""Source of a run for commands that read it: running services, or the run's folder."""

import contextlib
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relaxd.cli.options import DEFAULT_STATE
from relaxd.cli.output import show
from relaxd.client import CliError, NotFoundError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.client.folder_runs import FolderRuns, RunReader
from relaxd.local.stack import address_here, open_client
from relaxd.local.state_folder import StateFolder
from relaxd.run_folder import LOGS, holder_of, is_run
from relaxd.v1 import coordinator_pb2 as pb

RUNS = Path("runs")
"""Default folder that contains runs' folders, relative to the current folder."""


@dataclass(frozen=True)
class RunSource:
    """A run, and the coordinator or the run's folder from which commands read it."""

    reader: RunReader
    run: pb.Run
    """The run's state when the command began."""
    address: str = ""
    """Address of the run's coordinator; "" if the run is read from its folder."""

    @property
    def folder(self) -> Path:
        """The run's folder. Raises CliError if the folder is on another machine."""
        folder = Path(self.run.folder)
        if not folder.is_dir():
            raise CliError(
                f"the files of run {self.run.run_id} are on the coordinator's machine, in {folder}",
                "use the command there, or on a copy: --folder DIR",
            )
        return folder


@contextlib.contextmanager
def open_run(run_id: str, folder: Path | None, state: Path, coordinator: str | None) -> Iterator[RunSource]:
    """Find a run; `run_id` may also be the path of its folder, and "" is the newest run.

    The coordinator, named or running here, answers for the runs that it knows. Every other run is read from its folder,
    below `runs`; if such a run has not ended, a last line on standard error says how to continue it. Raises CliError.
    """
    local = _local_folder(run_id, folder)
    wanted = FolderRuns([local]).run().run_id if local is not None else run_id
    address = address_here(state, coordinator)
    if address is not None:
        with open_client(address, state) as client:
            run = _known_run(client, wanted)
            if run is not None and (folder is None or Path(run.folder) == local):  # a copy may have its id
                yield RunSource(client, run, address)
                return
    reader = FolderRuns([local]) if local is not None else FolderRuns.below(RUNS)
    try:
        run = reader.run(wanted)
    except NotFoundError as error:
        raise (error if address is not None else _no_run(run_id, state)) from None
    yield RunSource(reader, run)
    if note := left_note(run, state):
        show(note, file=sys.stderr)


def left_note(run: pb.Run, state: Path) -> str:
    """Return advice on continuing a run that no coordinator here works on; "" if the run has ended."""
    if run.state in ENDED:
        return ""
    if holder := holder_of(Path(run.folder)):
        return (
            f"run {run.run_id} has not ended: a coordinator that isn't up here works on it (stack {holder}); "
            "--state DIR or --coordinator HOST:PORT asks it"
        )
    if began_on_up(Path(run.folder)):
        command = shlex.join(["relaxd", "up", *_state_words(state)])
    else:
        command = resume_command(run.run_id, Path(run.folder), state)
    at = f"step {run.step}/{run.steps}"
    return f"run {run.run_id} has not ended ({at}), and its services are gone; {command} continues it"


def began_on_up(run_folder: Path) -> bool:
    """Return True if the run used services of `relaxd up`, so that the next `relaxd up` continues it."""
    return not (run_folder / LOGS).is_dir()


def failed_by_data(run: pb.Run) -> bool:
    """Return True if a run failed because of its data. Such a run can continue once the data is repaired."""
    return run.outcome == pb.RUN_OUTCOME_DATA_FAILED


def refuse_ended(run: pb.Run, steps: int) -> None:
    """Raise CliError if a run can't continue: it has done `steps` steps already, or has ended and `steps` is 0.

    `steps`: the new number of steps; 0: not changed. A run that failed because of its data can continue.
    """
    if steps and steps <= run.step:
        raise CliError(f"--run.steps {steps}: run {run.run_id} has done {run.step} steps already")
    if run.state in ENDED and not steps and not failed_by_data(run):
        done = f"{run.step} of {run.steps} steps are done"
        more = run.steps if run.step < run.steps else 2 * run.steps
        raise CliError(
            f"run {run.run_id} has ended ({run.reason}): {done}",
            f"relaxd resume {run.run_id} --run.steps {more} lets it go on, relaxd run starts a new one",
        )


def resume_command(run_id: str, run_folder: Path, state: Path) -> str:
    """Return the `relaxd resume` command line that continues a run."""
    words = ["relaxd", "resume", run_id]
    if run_folder.resolve() != (RUNS / run_id).resolve():
        words += ["--folder", str(run_folder)]
    return shlex.join([*words, *_state_words(state)])


def _state_words(state: Path) -> list[str]:
    """Return the command-line words that name a state folder; no words for the default folder."""
    return [] if state.resolve() == DEFAULT_STATE.resolve() else ["--state", str(state.resolve())]


def _known_run(client: CoordinatorClient, run_id: str) -> pb.Run | None:
    """Return a run from the coordinator ("" is the newest run); None if the coordinator doesn't know the run.

    Raises CliError: the coordinator doesn't answer.
    """
    try:
        return client.run(run_id)
    except NotFoundError:
        return None


def _local_folder(run_id: str, folder: Path | None) -> Path | None:
    """Return the run's folder: `folder`, else RUN or runs/RUN if a run is there, else None. Raises CliError for a wrong
    `folder`.
    """
    if folder is not None:
        if not is_run(folder):
            raise CliError(f"{folder} is not the folder of a run", "--folder DIR names one (default: runs/RUN)")
        return folder.resolve()
    found = (path for path in (Path(run_id), RUNS / run_id) if run_id and is_run(path))
    path = next(found, None)
    return path.resolve() if path is not None else None


def _no_run(run_id: str, state: Path) -> CliError:
    what = f"{RUNS / run_id} is not the folder of a run" if run_id else f"{RUNS} has no run"
    here = FolderRuns.below(RUNS)
    known = here.hint(run_id) if any(here.runs()) else "relaxd run FILE.toml starts a run"
    return CliError(
        f"{what}, and no services are up here (in {StateFolder(state).path})",
        f"{known}; --folder DIR, --state DIR or --coordinator HOST:PORT look elsewhere",
    )
