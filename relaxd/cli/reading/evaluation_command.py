"""`relaxd evaluation`: results and answers of evaluations, from the run's folder."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.output import plain_table, show_json
from relaxd.cli.reading.live_view import printable
from relaxd.cli.reading.run_source import open_run
from relaxd.client import CliError
from relaxd.evaluation.sets import unknown_set
from relaxd.report.run_result import RunResult, SetRow, place_of, read_result, table_of
from relaxd.telemetry.logs import escape


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
    """Format results of evaluations, a metric per row, with 95 % confidence intervals in brackets."""
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
    """Return the set whose answers to show. Raises CliError if no answers were kept."""
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
    """Return the step to show. Raises CliError if its answers were not kept."""
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
