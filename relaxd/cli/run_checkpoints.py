"""Checkpoints of a run on the command line: `relaxd checkpoints`, `replay` and `export`, and the last checkpoint before
services stop.
"""

import json
import math
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.table import Table

from relaxd.best_checkpoint import BestCheckpoint, find_best
from relaxd.cli.options import FolderOption, RunNameArgument, new_console
from relaxd.cli.output import plain_table, show
from relaxd.cli.reading.run_source import RUNS
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, CoordinatorClient
from relaxd.client.folder_runs import FolderRuns
from relaxd.config import RunConfig
from relaxd.config.algorithm import OwnConfig
from relaxd.config.load_toml import load_recorded
from relaxd.local.programs import EXPORT_CHECKPOINT, REPLAY, run_program
from relaxd.local.stack import open_client
from relaxd.run_folder import (
    CHECKPOINT_STATE,
    CONFIG,
    KEPT,
    LEDGER,
    checkpoint_path,
    checkpoint_steps,
    newest_lines,
    step_files,
)
from relaxd.text import byte_amount
from relaxd.v1.coordinator_pb2 import RUN_STATE_PAUSED, RUN_STATE_RUNNING

CONTENTS = "bundle.json"
"""Name of the file that describes a bundle. Its other files have the same relative paths as in the run's folder."""
MODEL = "model"
"""Name of the folder with the initial model in a bundle with weights."""
HINT = "relaxd bundle RUN --step N makes one"


@dataclass(frozen=True)
class Bundle:
    """Content of a bundle's file bundle.json."""

    run_id: str
    step: int
    """Number of the step that the bundle is about."""
    start: int | None
    """Step of the checkpoint from which a replay starts; 0: the initial model; None: the bundle has no weights."""


@contextmanager
def opened_bundle(path: Path) -> Iterator[tuple[Path, Bundle]]:
    """Unpack a bundle into a temporary folder, and yield that folder, usable as a run's, and bundle.json's content.

    Raises CliError.
    """
    with TemporaryDirectory(prefix="relaxd-bundle-") as place:
        folder = Path(place)
        try:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
            facts = Bundle(**json.loads((folder / CONTENTS).read_text(encoding="utf-8")))
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            config["model"]["path"] = str(folder / MODEL)
        except KeyError as error:
            raise CliError(f"{path} is not a bundle: its {CONFIG} has no {error}", HINT) from error
        except (OSError, tarfile.TarError, ValueError, TypeError) as error:
            raise CliError(f"{path} is not a bundle: {error}", HINT) from error
        if facts.start is None:
            raise CliError(f"{path} has no weights to repeat the step with", "relaxd bundle --weights adds them")
        (folder / CONFIG).write_text(json.dumps(config))
        yield folder, facts


REPLAY_SECONDS = 24 * 3600.0
"""Deadline of a replay or export, in seconds; loading a large model takes long."""


def replay(
    run_id: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="The run's id, or a bundle's file.")],
    step: Annotated[int | None, typer.Option(min=1, help="Step to repeat; default: a bundle's.")] = None,
    folder: FolderOption = None,
    own_code: Annotated[
        bool, typer.Option("--own-code", help="Import and run the algorithm's class that a bundle names.")
    ] = False,
) -> None:
    """Repeat one recorded step and compare the results; exit with 1 if they differ.

    A bundle is repeated on this machine, wherever its run was; another kind of device rounds otherwise. Its
    configuration is used, and shown as far as it says what runs here.
    """
    if folder is None and Path(run_id).is_file():
        with opened_bundle(Path(run_id)) as (found, facts):
            if step not in (None, facts.step):
                raise CliError(f"{run_id} is about step {facts.step}: it can't repeat step {step}")
            used = used_by_replay(found, own_code=own_code)
            show(f"step {facts.step} of run {facts.run_id}, by the configuration in {run_id}: {used}")
            _replay_and_compare(found, facts.step)
        return
    if step is None:
        raise CliError(f"which step of run {run_id}?", "--step N names it; only a bundle has one")
    found = run_folder(run_id, folder)
    if step > (done := steps_done(found)):
        raise CliError(f"run {run_id} has done {done} steps: there is no step {step} to repeat")
    _replay_and_compare(found, step)


def used_by_replay(folder: Path, *, own_code: bool) -> str:
    """Describe the ranks, the algorithm and the models that a replay of an unpacked bundle uses.

    Of the code that a configuration can name, a replay runs only a user's algorithm. Raises CliError for such an
    algorithm, unless `own_code`.
    """
    config = config_of(folder)
    algorithm = f'algorithm.name = "{config.algorithm.name}"'
    if isinstance(config.algorithm, OwnConfig):
        if not own_code:
            raise CliError(
                f"the bundle's {algorithm} is code, which this machine would import and run",
                "if you know it and trust who packed the bundle: --own-code",
            )
        algorithm += ", a class of this machine's own code"
    roles = [config.roles.frozen[role].settings for role in config.frozen_roles("trainer")]
    models = [f', {setting} = "{model}"' for settings in roles for setting, model in settings.items() if model]
    ranks = f"{config.trainer.ranks} rank{'s' * (config.trainer.ranks > 1)}"
    return f"{ranks}, {algorithm}{''.join(models)}"


def export(
    run_id: RunNameArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint; default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint (trainer.checkpoint.keep_best).")] = False,
    folder: FolderOption = None,
) -> None:
    """Export a checkpoint's model as a Hugging Face folder."""
    found = run_folder(run_id, folder)
    if best and step is not None:
        raise CliError(f"--best and --step {step} name two checkpoints: give one of them")
    result = export_model(found, best_step(found) if best else step, out)
    show(f"step {result['step']}: {result['path']}")


def checkpoints(run_id: RunNameArgument, folder: FolderOption = None) -> None:
    """List a run's checkpoints: the newest, the best, and those that are kept for ever."""
    found = run_folder(run_id, folder)
    steps = checkpoint_steps(found)
    if not steps:
        show(f"run {run_id} has no checkpoint yet")
        return
    best = _best_of(found)
    table = plain_table("step", "taken", "size", "", right=("step", "size"))
    for step in steps:
        path = checkpoint_path(found, step)
        marks = ["newest"] if step == steps[0] else []
        if best is not None and best.step == step:
            marks.append(f"best ({config_of(found).trainer.checkpoint.keep_best} = {best.value:.4g})")
        if (path / KEPT).exists():
            marks.append("kept: relaxd checkpoint took it")
        taken = datetime.fromtimestamp((path / CHECKPOINT_STATE).stat().st_mtime, UTC)
        size = sum(file.stat().st_size for file in path.iterdir())
        table.add_row(str(step), f"{taken:%Y-%m-%d %H:%M}", byte_amount(size), ", ".join(marks))
    new_console().print(table)


def best_step(folder: Path) -> int:
    """Return the step of a run's best checkpoint. Raises CliError: it has none."""
    best = _best_of(folder)
    if best is None:
        setting = config_of(folder).trainer.checkpoint.keep_best
        raise CliError(
            f"{folder} has no best checkpoint: "
            + (f"no evaluation has {setting} of one of its checkpoints" if setting else "it was not asked to keep it"),
            'trainer.checkpoint.keep_best = "eval.SET.METRIC" keeps it; relaxd checkpoints RUN lists what is there',
        )
    return best.step


def _best_of(folder: Path) -> BestCheckpoint | None:
    return find_best(folder, config_of(folder).trainer.checkpoint.keep_best, checkpoint_steps(folder))


def config_of(folder: Path) -> RunConfig:
    """Load the configuration in a run's folder. Raises the errors of `load_recorded`."""
    return load_recorded((folder / CONFIG).read_text(encoding="utf-8"), folder.name)


def run_folder(run_id: str, folder: Path | None) -> Path:
    """Return the folder of a run: `folder`, else runs/RUN or RUN. Raises CliError if it isn't a run's folder."""
    places = [folder] if folder is not None else [RUNS / run_id, Path(run_id)]
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        hint = "--folder DIR names it (default: runs/RUN)"
        if folder is None:
            hint = f"{FolderRuns.below(RUNS).hint(run_id)}; {hint}"
        raise CliError(f"{places[0].resolve()} is not the folder of a run", hint)
    return found.resolve()


def newest_unfinished() -> Path:
    """Return the folder of the newest run in runs/ that has not ended. Raises CliError when there is none."""
    for run in FolderRuns.below(RUNS).runs():
        if run.state not in ENDED:
            return Path(run.folder)
    raise CliError(
        f"no services are up here, and {RUNS} has no run that has not ended",
        "relaxd resume RUN --run.steps N lets an ended run go on; relaxd runs lists them",
    )


def export_model(folder: Path, step: int | None, target: Path) -> dict[str, Any]:
    """Export a checkpoint, by default the newest, as a Hugging Face folder. Returns {"path", "step"}.

    Raises CliError: there is no such checkpoint, or it can't be used.
    """
    words = ["--run-folder", str(folder), "--out", str(target.resolve())]
    words += [] if step is None else ["--step", str(step)]
    return run_program(EXPORT_CHECKPOINT, words, seconds=REPLAY_SECONDS)


def replay_step(folder: Path, step: int) -> dict[str, Any]:
    """Repeat one step from the nearest checkpoint before it. Returns the program's JSON result.

    Raises CliError: its checkpoint or step files are gone.
    """
    return run_program(REPLAY, ["--run-folder", str(folder), "--step", str(step)], seconds=REPLAY_SECONDS)


def steps_done(folder: Path) -> int:
    """Return the number of a run's last step with a line in the ledger or a step file; 0 if there is none."""
    return max([next(newest_lines(folder / LEDGER), {}).get("step", 0), *step_files(folder)])


def _replay_and_compare(folder: Path, step: int) -> None:
    result = replay_step(folder, step)
    new_console().print(replay_table(result))
    different = {name: n for name, n in result["numbers"].items() if n["recorded"] not in (None, n["replayed"])}
    for name, numbers in different.items():
        if not name.endswith("checksum"):  # which is the same or not
            recorded = numbers["recorded"]
            far = abs(numbers["replayed"] - recorded) / abs(recorded) if recorded else math.inf
            show(f"{name} differs by {far:.1e} of the recorded size")
    if different:
        raise typer.Exit(1)


def replay_table(result: dict[str, Any]) -> Table:
    """Return a table that compares the recorded numbers of a step with those of its replay."""
    table = Table(title=f"step {result['step']}, from {result['start']}", title_justify="left", header_style="dim")
    for title in ("", "recorded", "replayed", ""):
        table.add_column(title, justify="right" if title else "left")
    for name, numbers in result["numbers"].items():
        recorded, replayed = numbers["recorded"], numbers["replayed"]
        same = "" if recorded is None else "the same" if recorded == replayed else "DIFFERENT"
        table.add_row(name, _shown(recorded), _shown(replayed), same)
    return table


def _shown(number: float | None) -> str:
    return "not recorded" if number is None else f"{number:.17g}"


MAX_SECONDS = 300.0
"""Maximum time to wait for a run's last checkpoint before its services stop, in seconds; the trainer may hang."""
UNDER_WAY = (RUN_STATE_RUNNING, RUN_STATE_PAUSED)
"""States of runs that need a checkpoint before their services stop. A stopping run saves a checkpoint by itself."""


def save_of_run_in_progress(address: str, state: Path, say: Callable[[str], None]) -> str:
    """Ask the coordinator of a state folder to save a checkpoint of the run in progress, if any.

    Returns the run's id; "" if no run is in progress, or the coordinator can't be asked.
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
    """Save a checkpoint of a run, if its configuration has checkpoints. Ctrl-C skips this. `say`: prints a line."""
    try:
        run = coordinator.run(run_id)
        if not run.step or not load_recorded(run.config_json, run_id).trainer.checkpoint.every:
            return  # there is nothing to save
        say(f"saving a checkpoint of run {run_id} (Ctrl-C skips it)")
        saved = coordinator.save_checkpoint(run_id, rotate=True, seconds=MAX_SECONDS)
        say(f"the checkpoint of step {saved.weights.version} is on disk")
    except CliError as error:
        say(f"no checkpoint was saved: {error}; a resume repeats the steps after the last checkpoint")
    except KeyboardInterrupt:
        say("no checkpoint was saved")
