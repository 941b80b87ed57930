"""`relaxd watch`, `samples`, `metrics`, `runs`, `report` and `evaluation`: tables of runs."""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import (
    DEFAULT_STATE,
    CoordinatorOption,
    FolderOption,
    RunArgument,
    StateOption,
    new_console,
)
from relaxd.cli.output import plain_table, show, show_json
from relaxd.cli.reading.follow import follow, interrupt_code
from relaxd.cli.reading.live_view import printable, samples_table
from relaxd.cli.reading.run_source import RUNS, left_note, open_run
from relaxd.client import CliError
from relaxd.client.coordinator_client import ENDED, state_name
from relaxd.client.folder_runs import FolderRuns, step_lines
from relaxd.client.metric_series import MAX_POINTS, rows
from relaxd.evaluation.sets import unknown_set
from relaxd.local.stack import address_here, open_client, raise_when_down
from relaxd.local.state_folder import StateFolder
from relaxd.report.report_files import write_report
from relaxd.report.run_result import RunResult, SetRow, place_of, read_result, sample_values, table_of
from relaxd.report.step_times import tables
from relaxd.run_folder import (
    COMPARED_METRICS,
    METRICS,
    OF_ORIGINAL,
    RECORD,
    all_samples_file,
    newest_lines,
    with_original,
)
from relaxd.telemetry.logs import escape
from relaxd.v1 import coordinator_pb2 as pb

SHOWN_METRICS = (
    "reward_mean",
    "loss",
    "grad_norm",
    "entropy",
    "response_length_mean",
    "staleness_mean",
    "step_seconds",
)
"""Names of the metrics that `relaxd metrics` shows by default; metrics that a run lacks are left out."""
MAX_TITLE = 10
"""Maximum width of a table column's title, in characters; longer names of metrics are broken into lines."""
GAP = 2
REWARD_STEPS = 5
"""Number of steps at a run's end over which `relaxd runs` averages the reward."""


def watch(
    run_id: RunArgument = "",
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Watch a run until it ends, on the whole screen of a terminal; q and Ctrl-C only stop watching."""
    with open_run(run_id, folder, state, coordinator) as source:
        healthy = raise_when_down(StateFolder(state), source.address, source.run.run_id)
        try:
            console = new_console()
            # textual reads standard input and draws on standard error.
            on_terminal = console.is_terminal and sys.stdin.isatty() and sys.stderr.isatty()
            in_place = not on_terminal or source.run.state in ENDED
            if not in_place and find_spec("textual") is not None:
                from relaxd.cli.reading.full_screen import follow_full_screen  # takes half a second

                follow_full_screen(source.reader, source.run, console, healthy)
                return
            if not in_place:
                console.print("pip install 'relaxd[watch]' brings the full screen", style="dim")
            follow(source.reader, source.run.run_id, console, healthy=healthy)
        except KeyboardInterrupt as interrupt:
            raise typer.Exit(interrupt_code(interrupt)) from None


def samples(
    run_id: RunArgument = "",
    step: Annotated[int, typer.Option(min=0, help="Show samples of this step; 0: the newest.")] = 0,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100_000, help="Maximum number of samples.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show trained samples with reward, advantage and weight version."""
    with open_run(run_id, folder, state, coordinator) as source:
        # The coordinator has only the samples that are shown.
        kept = all_samples_file(Path(source.run.folder), step).is_file()
        reader = FolderRuns([Path(source.run.folder)]) if kept else source.reader
        found = reader.samples(source.run.run_id, step, limit)
        if step and not found:
            raise CliError(f"no samples of step {step}: run {source.run.run_id} has trained {source.run.step} steps")
        if as_json:
            for sample in found:
                show_json(sample_values(sample))
        elif found:
            new_console().print(samples_table(found))
        else:
            show("no samples yet: they come with the first trained step")


def metrics(
    run_id: RunArgument = "",
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[METRIC]...", help="Metrics to show; default: a few.")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="Show only this many newest steps; 0: all.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print every metric, one JSON object per step.")] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show the metrics of a run's steps (docs/metrics.md explains them)."""
    with open_run(run_id, folder, state, coordinator) as source:
        if Path(source.run.folder).is_dir():
            lines = list(with_original(source.folder, step_lines(source.folder)))
        else:  # on the coordinator's machine
            asked = [] if as_json and not names else names or SHOWN_METRICS
            first_step = max(1, source.run.step - last + 1) if last else 1
            request = pb.GetMetricsRequest(run_id=source.run.run_id, first_step=first_step, names=asked)
            request.max_points = MAX_POINTS
            lines = rows(source.reader.series(request))
        if not lines:
            show("no metrics yet: they come with the first trained step")
            return
        shown = {name for line in lines for name, value in line.items() if as_json or not isinstance(value, dict)}
        known = sorted(shown - {"step"})
        for name in names or ():
            if name not in known:
                raise CliError(f"run {source.run.run_id} has no metric {name!r}", f"there are {', '.join(known)}")
        lines = lines[-last:]
        if as_json:
            for line in lines:
                show(json.dumps({name: line[name] for name in ("step", *(names or known)) if name in line}))
        else:
            console = new_console()
            console.print(*metrics_tables(lines, names or shown_metrics(known), console.width), sep="\n")


def runs(state: StateOption = DEFAULT_STATE, coordinator: CoordinatorOption = None) -> None:
    """List the runs with their results: those in runs/, and those known to the services."""
    print_runs(state, coordinator, new_console())


def print_runs(state: Path, coordinator: str | None, console: Console, run_id: str = "") -> None:
    """Print a table of the runs in runs/ and of those that the services know; with `run_id`, only of this run.

    Raises CliError: a named coordinator does not answer, or there is no such run.
    """
    silent: CliError | None = None
    found: dict[str, pb.Run] = {} if coordinator else {run.run_id: run for run in FolderRuns.below(RUNS).runs()}
    live: set[str] = set()
    if (address := address_here(state, coordinator)) is not None:
        try:
            with open_client(address, state) as client:
                known = {run.run_id: run for run in client.runs()}
        except CliError as error:
            if coordinator:
                raise
            silent = error
        else:
            live = set(known)
            found |= known
    if run_id and run_id not in found:
        raise CliError(f"there is no run {run_id} here", FolderRuns.below(RUNS).hint(run_id))
    if not found:
        console.print("no runs yet: relaxd run FILE.toml starts one")
        return
    shown = [found[run_id]] if run_id else found.values()
    ordered = sorted(shown, key=lambda run: run.create_time.ToNanoseconds(), reverse=True)
    console.print(_runs_table(ordered, live, known_to_live=silent is None))
    for run in ordered:
        if run.outcome == pb.RUN_OUTCOME_COMPLETED and run.reason not in ("", "completed"):
            console.print(f"{run.run_id} {run.reason}", soft_wrap=True, markup=False, highlight=False)
    if silent is not None:  # it may still work on one of them
        console.print(f"{silent.message}; {silent.hint}", soft_wrap=True, markup=False)
        return
    for run in ordered:
        if run.run_id not in live and (note := left_note(run, state)):
            console.print(note, soft_wrap=True)


def _runs_table(runs: Sequence[pb.Run], live: set[str], *, known_to_live: bool) -> Table:
    """Return a table of runs. `live`: ids of the runs that services here work on, if `known_to_live`.

    With `known_to_live`, a run that has not ended and isn't in `live` is shown as interrupted.
    """
    numbers = ("step", "reward", "held-out", "time")
    table = plain_table("run", "state", "step", "reward", "held-out", "started", "time", right=numbers)
    table.columns[0].no_wrap = True  # ids are copied
    for run in runs:
        left = known_to_live and run.state not in ENDED and run.run_id not in live
        started = run.create_time.ToDatetime()
        seconds = (run.end_time.ToDatetime() - started).total_seconds() if run.HasField("end_time") else None
        table.add_row(
            run.run_id,
            "interrupted" if left else state_name(run.state),
            f"{run.step}/{run.steps}",
            *_results(Path(run.folder)),
            f"{started:%Y-%m-%d %H:%M}",
            "" if seconds is None else f"{seconds:.0f} s",
        )
    return table


def _results(folder: Path) -> tuple[str, str]:
    """Return texts of a run's mean reward in its last steps, and its held-out reward before and after training.

    A text is "" if the value isn't known.
    """
    rewards: list[float] = []
    for line in newest_lines(folder / METRICS):
        if len(rewards) == REWARD_STEPS or line.get("step", 0) <= 0:
            break
        if line.get("reward_mean") is not None:
            rewards.append(float(line["reward_mean"]))
    evaluations: list[Mapping[str, Any]] = []
    with suppress(OSError, ValueError):
        evaluations = json.loads((folder / RECORD).read_text()).get("evaluations", [])
    scores = [f"{one['metrics']['eval_reward']:.2f}" for one in evaluations if "eval_reward" in one["metrics"]]
    held_out = scores[:1] + scores[1:][-1:]
    return f"{sum(rewards) / len(rewards):.3f}" if rewards else "", " → ".join(held_out)


def shown_metrics(known: Sequence[str]) -> list[str]:
    """Return the default columns: SHOWN_METRICS, or for a fork the metrics compared with the original run."""
    compared = [name for one in COMPARED_METRICS for name in (one, f"{one}{OF_ORIGINAL}")]
    is_fork = any(name.endswith(OF_ORIGINAL) for name in known)
    return [name for name in (compared if is_fork else SHOWN_METRICS) if name in known]


def metrics_tables(lines: Sequence[Mapping[str, Any]], names: Sequence[str], width: int) -> list[Table]:
    """Format metrics as tables of at most `width` characters, each with the maximum number of columns."""
    tables: list[list[list[str]]] = []
    for name in names:
        column = [_title(name), *(_cell(line.get(name)) for line in lines)]
        if not tables or _width([*tables[-1], column]) > width:
            tables.append([["step", *(str(line["step"]) for line in lines)]])
        tables[-1].append(column)
    return list(map(_table, tables))


def _title(name: str) -> str:
    """Break a metric's name at underscores and spaces into lines of at most MAX_TITLE characters, if possible."""
    lines = [""]
    for part in re.findall("[^_ ]*[_ ]*", name):
        if len(lines[-1] + part) <= MAX_TITLE:
            lines[-1] += part
        else:
            lines.append(part)
    return "\n".join(filter(None, lines))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}"


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(len(line) for cell in column for line in cell.split("\n")) + GAP for column in columns)


def _table(columns: Sequence[Sequence[str]]) -> Table:
    titles = [title for title, *_ in columns]
    table = plain_table(*titles, right=titles)
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*row)
    return table


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


def evaluation(
    run_id: RunArgument = "",
    name: Annotated[
        str, typer.Option("--set", help="Set whose answers to show; default: the first that has some.")
    ] = "",
    step: Annotated[
        int | None, typer.Option(min=0, help="Step that was evaluated, 0 for the initial model; default: the newest.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of answers.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per answer and line.")] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show the results on each evaluation set over the steps, and answers beside those of the first evaluation."""
    with open_run(run_id, folder, state, coordinator) as source:
        result = read_result(source.folder)
        name = _answered_set(result, name)
        step = _evaluated_step(result, name, step)
        answers = result.answers(step, name, limit)
        if as_json:
            for answer in answers:
                show_json(answer)
            return
        console = new_console()
        if rows := result.set_rows:
            console.print(results_table(rows), "")
        first = result.evaluation_steps(name)[0]
        earlier = {}
        if first != step:
            earlier = {place_of(answer): answer for answer in result.answers(first, name, limit)}
        console.print(_answers_table(step, answers, first, earlier))


def results_table(rows: Sequence[SetRow]) -> Table:
    """Return a table of evaluation results: a row for each metric, with 95 % confidence intervals in brackets."""
    titles, cells = table_of(rows)
    table = plain_table("set", "step", "metric", "value", right=("step",))
    for column in table.columns[1:]:
        column.no_wrap = True
    for name, step, *values in cells:
        place = [name, step]
        for metric, value in zip(titles[2:], values, strict=True):
            if value:
                table.add_row(*place, metric, value)
                place = ["", ""]  # once above its metrics
    return table


def _answered_set(result: RunResult, name: str) -> str:
    """Return the name of the evaluation set whose answers to show. Raises CliError if no answers were kept."""
    known = result.answered_sets
    if not known:
        raise CliError(
            f"run {result.run_id} has no answers of an evaluation in {result.folder}",
            "eval.prompts or [[eval.sets]] say what is answered (docs/evaluation.md)",
        )
    if name and name not in known:
        raise CliError(f"run {result.run_id}: {unknown_set(name, known)}")
    return name or known[0]


def _evaluated_step(result: RunResult, name: str, step: int | None) -> int:
    """Return the step whose evaluation answers to show. Raises CliError if the step's answers were not kept."""
    steps = result.evaluation_steps(name)
    if step is not None and step not in steps:
        raise CliError(
            f"run {result.run_id} has no evaluation of step {step}", f"there are those of {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def _answers_table(
    step: int, answers: Sequence[Mapping[str, Any]], first: int, earlier: Mapping[tuple[int, int], Mapping[str, Any]]
) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("prompt", overflow="fold", max_width=48)
    table.add_column("answer", overflow="fold", max_width=24)
    for shown in [first, step] if earlier else [step]:
        table.add_column(f"response, step {shown}", overflow="fold", max_width=48)
        table.add_column("reward", justify="right")
    for answer in answers:
        cells = [printable(answer.get("prompt", f"prompt {answer['index']}")), printable(answer.get("answer", ""))]
        for one in [earlier.get(place_of(answer)), answer] if earlier else [answer]:
            cells += [Text(), Text()] if one is None else [_response(one), _reward(one)]
        table.add_row(*cells)
    return table


def _response(answer: Mapping[str, Any]) -> Text:
    if "response" not in answer:
        return Text("(not kept)", "dim")
    return printable(answer["response"]) or Text("(nothing)")


def _reward(answer: Mapping[str, Any]) -> Text:
    return Text(escape(answer["error"]), "red") if answer["error"] else Text(f"{answer['reward']:.2f}")
