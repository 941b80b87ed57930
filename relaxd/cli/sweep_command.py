"""`relaxd sweep`: runs that differ in settings, one after the other, and their results in one table and one plot."""

import csv
import hashlib
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field, ValidationError, field_validator
from rich.console import Console

from relaxd.best_checkpoint import WatchedMetric, parse_metric
from relaxd.cli.execute import Where, execute, execute_again, find_services, unfinished
from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, StateOption, new_console, with_replica_options
from relaxd.cli.output import plain_table
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import MAX_CHARACTERS, ConfigError, load_file, override
from relaxd.config.section import Section
from relaxd.config.write_toml import dump_changes, toml
from relaxd.report.report_files import running_mean
from relaxd.report.run_result import RunResult, read_result
from relaxd.run_folder import is_run

MAX_RUNS = 1000
"""Maximum number of runs of a sweep."""
Values = dict[str, Any]
"""Settings by name, such as {"rollout.top_p": 0.9}."""


def flat(value: Any, place: str = "") -> Any:
    """Return nested settings as one table with dotted names; any other value unchanged.

    rollout.top_p is then the same setting with and without quotes.
    """
    if not isinstance(value, Mapping):
        return value
    found: Values = {}
    for name, one in value.items():
        inner = flat(one, f"{place}{name}.")
        found |= inner if isinstance(one, Mapping) else {f"{place}{name}": one}
    return found


class Sweep(Section):
    """Content of a sweep's TOML file: a base configuration and the settings in which runs differ."""

    base: Path
    """Path of the configuration file of all runs, relative to the sweep's file."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_-]{0,32}$")
    """Beginning of the runs' ids; by default the name of the sweep's file."""
    metric: str = ""
    """Evaluation metric that ranks the runs, in the form of trainer.checkpoint.keep_best; "": the training reward."""
    settings: Values = Field(default_factory=dict)
    """Settings of all runs that override `base`."""
    grid: dict[str, list[Any]] = Field(default_factory=dict)
    """Values to try, by setting; each combination of values is a run."""
    runs: tuple[Values, ...] = ()
    """Settings of each run, in place of `grid`."""

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
    """Planned run of a sweep, with its configuration."""

    run_id: str
    settings: Values
    """The run's values of the settings in which runs of the sweep differ."""
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder.expanduser().resolve() / self.run_id


LAST_STEPS = 5
"""Number of steps at a run's end over which a sweep averages the reward."""
TABLE = "sweep.csv"
PLOT = "sweep.png"
MAX_COLORS = 10
"""Number of colours of matplotlib's default cycle; further runs get other line styles."""
LINES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class SweepRow:
    """Row of a sweep's table: a run with its settings and result."""

    run_id: str
    settings: Mapping[str, Any]
    """The run's values of the settings in which runs of the sweep differ."""
    result: RunResult | None
    """Result of the run; None before it begins."""

    @property
    def label(self) -> str:
        """Text with the settings in which the run differs from others of the sweep."""
        return ", ".join(f"{name.rpartition('.')[2]} {value}" for name, value in self.settings.items())

    @property
    def state(self) -> str:
        """Outcome of the run, or "not begun" or "not ended"."""
        if self.result is None:
            return "not begun"
        return str(self.result.summary.get("outcome") or "not ended")

    @property
    def reward(self) -> float | None:
        """Mean reward of the run's last steps."""
        last = [line["reward_mean"] for line in self.result.steps[-LAST_STEPS:]] if self.result else []
        return sum(last) / len(last) if last else None

    def evaluated(self, metric: WatchedMetric) -> dict[int, float]:
        """Return the metric's values by step, including the initial model's."""
        lines = self.result.lines if self.result else []
        return {line["step"]: line[metric.key] for line in lines if line.get(metric.key) is not None}


def sweep_table(rows: Sequence[SweepRow], metric: WatchedMetric | None) -> tuple[list[str], list[list[str]]]:
    """Return titles and cells: settings, steps, reward, and the best and the last value of a metric.

    The best run is first; runs without a result are last.
    """
    names = sorted({name for row in rows for name in row.settings})
    titles = ["run", *names, "state", "steps", "reward"]
    titles += [f"best {metric.metric}", "at step", f"last {metric.metric}"] if metric else []
    cells = []
    for row in sorted(rows, key=lambda row: _order(row, metric)):
        line = [row.run_id, *(str(row.settings.get(name, "")) for name in names), row.state]
        line += [str(len(row.result.steps)) if row.result else "", _shown(row.reward)]
        if metric is not None:
            values = row.evaluated(metric)
            best = metric.best(values)
            line += [_shown(values[best]), str(best), _shown(values[max(values)])] if best is not None else [""] * 3
        cells.append(line)
    return titles, cells


def _order(row: SweepRow, metric: WatchedMetric | None) -> tuple[bool, float]:
    """Return the key by which rows of a sweep's table are sorted, the best run first."""
    if metric is None:
        return row.reward is None, -(row.reward or 0.0)
    values = row.evaluated(metric)
    best = metric.best(values)
    if best is None:
        return True, 0.0
    return False, values[best] if metric.lowest else -values[best]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def write_sweep(folder: Path, rows: Sequence[SweepRow], metric: WatchedMetric | None) -> list[Path]:
    """Write the table, and with matplotlib the plot, into a folder. Returns their paths. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    titles, cells = sweep_table(rows, metric)
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([titles, *cells])
    if find_spec("matplotlib") is None:
        return [folder / TABLE]
    _draw(folder / PLOT, rows, metric)
    return [folder / TABLE, folder / PLOT]


def _draw(path: Path, rows: Sequence[SweepRow], metric: WatchedMetric | None) -> None:
    from matplotlib.figure import Figure  # slow to import, and only needed here

    figure = Figure(figsize=(9, 4.6 if metric is None else 8), dpi=150, layout="constrained")
    panels = figure.subplots(1 if metric is None else 2, squeeze=False)[:, 0]
    for number, row in enumerate(rows):
        style = {"color": f"C{number % MAX_COLORS}", "linestyle": LINES[number // MAX_COLORS % len(LINES)]}
        if row.result is not None and (steps := row.result.steps):
            rewards = running_mean([line["reward_mean"] for line in steps])
            panels[0].plot([line["step"] for line in steps], rewards, label=row.label, **style)
        if metric is not None and (values := row.evaluated(metric)):
            panels[1].plot(list(values), list(values.values()), marker="o", label=row.label, **style)
    titles = ("reward, mean of 5 steps", f"{metric.set_name}: {metric.metric}" if metric else "")
    for panel, title in zip(panels, titles, strict=False):
        panel.set_title(title, loc="left", fontsize=11)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png")


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
    rows = [SweepRow(run.run_id, run.settings, read_result(run.folder) if is_run(run.folder) else None) for run in runs]
    titles, cells = sweep_table(rows, metric)
    table = plain_table(*titles)
    for line in cells:
        table.add_row(*line)
    console.print(table)
    for path in write_sweep(runs[0].folder.parent / f"{sweep_name(file, given)}.sweep", rows, metric):
        console.print(str(path), soft_wrap=True)
    if failed or any(row.state != "completed" for row in rows):
        raise typer.Exit(1)


def _train(run: SweepRun, where: Where, console: Console) -> None:
    """Start a run of a sweep, or continue it if it has begun. Raises CliError, ConfigError."""
    if not is_run(run.folder):
        execute(run.config, run.run_id, where, console)
    elif where.address is None:
        execute_again(run.folder, where, console)
    else:
        raise CliError("it has not ended", f"relaxd watch {run.run_id} follows it; then repeat this command")


def sweep_name(file: Path, given: Sweep) -> str:
    """Return the sweep's name: the given one, else one made of the file's name."""
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
        if (count := math.prod(map(len, given.grid.values()))) > MAX_RUNS:
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
