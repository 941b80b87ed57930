"""`relaxd sweep`: runs that differ in settings, one after the other, and their results in one table and one plot."""

import hashlib
import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError, field_validator
from rich.console import Console
from rich.table import Table

from relaxd.best_checkpoint import WatchedMetric, parse_metric
from relaxd.cli.execute import Where, execute, execute_again, find_services, unfinished
from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, StateOption, new_console, with_replica_options
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import MAX_CHARACTERS, ConfigError, load_file, override
from relaxd.config.section import Section
from relaxd.config.write_toml import dump_changes, toml
from relaxd.report.sweep_results import SweepRow, read_row, sweep_table, write_sweep
from relaxd.run_folder import is_run

MAX_RUNS = 1000
"""Maximum number of runs of a sweep."""
Values = dict[str, Any]
"""Settings by name, such as {"rollout.top_p": 0.9}."""


def flat(value: Any, place: str = "") -> Any:
    """Return a flat table with dotted names, so that rollout.top_p is the same setting with and without quotes."""
    if not isinstance(value, Mapping):
        return value
    found: Values = {}
    for name, one in value.items():
        inner = flat(one, f"{place}{name}.")
        found |= inner if isinstance(one, Mapping) else {f"{place}{name}": one}
    return found


class Sweep(Section):
    """The content of a sweep's file."""

    base: Path
    """Configuration of all runs; relative to the sweep's file."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,32}$")
    """Beginning of the runs' ids; by default the file's name."""
    metric: str = ""
    """The metric that ranks the runs, as trainer.checkpoint.keep_best; empty: the training reward."""
    settings: Values = Field(default_factory=dict)
    """Settings of all runs, on top of `base`."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Values of settings, of which every combination is a run."""
    runs: tuple[Values, ...] = ()
    """Instead of grid: the settings of each run."""

    @field_validator("settings", "grid", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return flat(value)

    @field_validator("runs", mode="before")
    @classmethod
    def _names_of_runs(cls, value: Any) -> Any:
        return [flat(one) for one in value] if isinstance(value, list) else value

    @field_validator("metric")
    @classmethod
    def _is_metric(cls, text: str) -> str:
        if text:
            parse_metric(text)
        return text


@dataclass(frozen=True)
class SweepRun:
    """A run of a sweep."""

    run_id: str
    settings: Values
    """The settings in which runs of the sweep differ."""
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder.expanduser().resolve() / self.run_id


@with_replica_options
def sweep(
    replicas: Mapping[str, int],
    file: Annotated[Path, typer.Argument(metavar="SWEEP.toml", help="The sweep's file (docs/sweeps-and-hub.md).")],
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Run a configuration with several settings, one run after the other, and compare them. Skips what is done."""
    console = new_console()
    given = read_sweep(file)
    runs = plan_runs(file, given)
    metric = parse_metric(given.metric) if given.metric else None
    failed = 0
    for number, run in enumerate(runs, 1):
        if is_run(run.folder) and not unfinished(run.folder):
            continue
        shown = ", ".join(f"{name} = {toml(value)}" for name, value in run.settings.items())
        console.print(f"run {number} of {len(runs)}: {shown}", markup=False, soft_wrap=True)
        try:
            _train(run, find_services(replicas, state, coordinator), console)
        except (CliError, ConfigError) as error:  # the others may do better
            failed += 1
            console.print(f"run {run.run_id} failed: {error}", style="red", markup=False, soft_wrap=True)
    rows = [read_row(run.run_id, run.settings, run.folder) for run in runs]
    console.print(_table(rows, metric))
    for path in write_sweep(runs[0].folder.parent / f"{sweep_name(file, given)}.sweep", rows, metric):
        console.print(str(path), soft_wrap=True)
    if failed or any(row.state != "completed" for row in rows):
        raise typer.Exit(1)


def _train(run: SweepRun, where: Where, console: Console) -> None:
    """Start or continue a run. Raises CliError, ConfigError."""
    if not is_run(run.folder):
        execute(run.config, run.run_id, where, console)
    elif where.address is None:
        execute_again(run.folder, where, console)
    else:
        raise CliError("it has not ended", f"relaxd watch {run.run_id} follows it; then repeat this command")


def sweep_name(file: Path, given: Sweep) -> str:
    """Return the sweep's name."""
    return given.name or "".join(letter if letter.isalnum() else "-" for letter in file.stem)[:32]


def read_sweep(file: Path) -> Sweep:
    """Read a sweep's file. Raises CliError: it can't be read, or is wrong."""
    try:
        with file.open(encoding="utf-8") as opened:
            given = Sweep.model_validate(tomllib.loads(opened.read(MAX_CHARACTERS)))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CliError(f"{file} can't be read: {getattr(error, 'strerror', None) or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CliError(f"{file}: {where}: {first['msg']}", "docs/sweeps-and-hub.md has an example") from error
    if bool(given.grid) == bool(given.runs):
        found = "both grid and runs" if given.grid else "neither grid nor runs"
        raise CliError(f"{file} has {found}", "give [grid], of which every combination is a run, or a list [[runs]]")
    if empty := next((name for name, values in given.grid.items() if not values), None):
        raise CliError(f"{file}: grid.{empty} has no value", "give a list with at least one")
    return given


def plan_runs(file: Path, given: Sweep) -> list[SweepRun]:
    """Return the runs of a sweep; each id depends only on the run's settings. Raises CliError, ConfigError."""
    of_runs = list(given.runs)
    if given.grid:
        count = 1
        for values in given.grid.values():
            count *= len(values)
        if count > MAX_RUNS:
            raise CliError(f"{file}: grid has {count} combinations, more than {MAX_RUNS}")
        of_runs = [dict(zip(given.grid, values, strict=True)) for values in itertools.product(*given.grid.values())]
    found: dict[str, SweepRun] = {}
    for settings in of_runs:
        words = [override(name, value) for name, value in (given.settings | settings).items()]
        config = load_file(file.parent / given.base, words)
        if given.metric and (problem := config.metric_problem(given.metric)):
            raise CliError(f'{file}: metric is "{given.metric}": {problem}')
        digest = hashlib.sha256(dump_changes(config).encode()).hexdigest()[:8]
        run_id = f"{sweep_name(file, given)}-{digest}"
        if run_id in found:
            raise CliError(f"{file}: two runs have the same settings: {settings}", "remove one of them")
        found[run_id] = SweepRun(run_id, settings, config)
    return list(found.values())


def _table(rows: list[SweepRow], metric: WatchedMetric | None) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    titles, cells = sweep_table(rows, metric)
    for title in titles:
        table.add_column(title, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table
