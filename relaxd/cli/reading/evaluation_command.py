"""`relaxd evaluation`: the answers to held-out prompts, as an evaluation kept them in the run's folder."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.reading.source import open_run
from relaxd.cli.reading.view import printable
from relaxd.client.errors import CliError
from relaxd.report.result import RunResult, read_result


def evaluation(
    run_id: RunArgument = "",
    step: Annotated[
        int | None, typer.Option(min=0, help="Step that was evaluated, 0 for the initial model; default: the newest.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show the answers to held-out prompts, with their rewards, beside those of the first evaluation."""
    with open_run(run_id, folder, state, coordinator) as source:
        result = read_result(source.folder)
        step = _evaluated_step(result, step)
        answers = result.answers(step)[:limit]
        if as_json:
            for answer in answers:
                print(json.dumps(answer, ensure_ascii=False))
            return
        first = result.evaluation_steps[0]
        earlier = {answer["index"]: answer for answer in result.answers(first)} if first != step else {}
        new_console().print(_answers_table(step, answers, first, earlier))


def _evaluated_step(result: RunResult, step: int | None) -> int:
    """Return the step to show. Raises CliError: its answers were not kept."""
    steps = result.evaluation_steps
    if not steps:
        raise CliError(
            f"run {result.run_id} has no answers of an evaluation in {result.folder}",
            "eval.prompts says how many held-out prompts are answered, and data.eval_path where they come from",
        )
    if step is not None and step not in steps:
        raise CliError(
            f"run {result.run_id} has no evaluation of step {step}", f"there are those of {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def _answers_table(
    step: int, answers: Sequence[Mapping[str, Any]], first: int, earlier: Mapping[int, Mapping[str, Any]]
) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("prompt", overflow="fold", max_width=48)
    table.add_column("answer", overflow="fold", max_width=24)
    for shown in [first, step] if earlier else [step]:
        table.add_column(f"response, step {shown}", overflow="fold", max_width=48)
        table.add_column("reward", justify="right")
    for answer in answers:
        cells = [printable(answer["prompt"]), printable(answer["answer"])]
        for one in [earlier.get(answer["index"]), answer] if earlier else [answer]:
            cells += (
                [Text(), Text()] if one is None else [printable(one["response"]) or Text("(nothing)"), _reward(one)]
            )
        table.add_row(*cells)
    return table


def _reward(answer: Mapping[str, Any]) -> Text:
    return Text(answer["error"], "red") if answer["error"] else Text(f"{answer['reward']:.2f}")
