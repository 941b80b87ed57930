"""`relaxd ledger`: the outcome of every prompt, and trained groups compared with published ones."""

import math
import sys
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console

from relaxd.cli.options import DEFAULT_STATE, CoordinatorOption, FolderOption, RunArgument, StateOption, new_console
from relaxd.cli.output import plain_table, show, show_json
from relaxd.cli.reading.run_source import open_run
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.data import CurriculumConfig
from relaxd.data.curriculum.prompt_record import BUCKETS, GrowingRecord, PromptRecord
from relaxd.report.group_outcomes import (
    ConditionError,
    GroupTally,
    Summary,
    condition,
    of_prompt,
    read_fates,
    summarise_fates,
)
from relaxd.run_folder import CONFIG, GROUPS
from relaxd.telemetry.logs import escape

MEANS = {
    "prompt_tokens": "tokens of the prompt",
    "tokens": "tokens of an answer",
    "truncated": "share of answers cut off",
    "reward": "reward",
}


def ledger(
    run_id: RunArgument = "",
    prompt: Annotated[
        str, typer.Option(help="Only this prompt: its row in the data, such as 12, or a group's id, such as 0-000012.")
    ] = "",
    where: Annotated[str, typer.Option(help='Only groups like this: "reason = stale and tokens > 1000".')] = "",
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="Maximum number of groups that are listed.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per group.")] = False,
    folder: FolderOption = None,
    state: StateOption = DEFAULT_STATE,
    coordinator: CoordinatorOption = None,
) -> None:
    """Show what became of every prompt: trained in which step, or dropped and why, and how often it was tried again.

    Without --prompt, --where and --json: what was trained beside what was published.
    """
    try:
        tests = [of_prompt(prompt)] if prompt else []
        tests += [condition(where)] if where else []
    except ConditionError as error:
        raise CliError(f"--where: {error}") from error
    with open_run(run_id, folder, state, coordinator) as source:
        if not (source.folder / GROUPS).is_file():
            if source.run.step:
                raise CliError(
                    f"run {source.run.run_id} has no {GROUPS} in {source.folder}: it was made before relaxd kept one"
                )
            show("no groups yet: they come with the first that is trained or dropped", file=sys.stderr)
            return
        found = (line for line in read_fates(source.folder) if all(test(line) for test in tests))
        if as_json:
            for line in islice(found, limit):
                show_json(line)
        elif tests:
            _print_groups(list(islice(found, limit + 1)), limit, new_console())
        else:
            console = new_console()
            curriculum = RunConfig.model_validate_json((source.folder / CONFIG).read_bytes()).data.curriculum
            prompts = GrowingRecord(curriculum)
            _print_summary(summarise_fates(source.folder, prompts.observe), console)
            _print_prompts(prompts.record, curriculum, console)


def _print_groups(lines: list[dict[str, Any]], limit: int, console: Console) -> None:
    continued = ["continued"] if any("continued" in line for line in lines) else []  # only with partial rollout
    table = plain_table("group", "row", "source", "fate", "at", "tokens", "reward", *continued)
    for line in lines[:limit]:
        table.add_row(
            line["group"],
            _shown(line.get("index")),
            _shown(line.get("source")),
            _fate(line),
            line.get("stage", ""),
            _shown(line.get("tokens")),
            _shown(line.get("reward")),
            *(_shown(line.get(name)) for name in continued),
        )
    console.print(table if lines else "no group matches")
    if len(lines) > limit:
        console.print(f"... and more: these are the newest {limit} (--limit)")


def _fate(line: dict[str, Any]) -> str:
    tried = f" (try {line['retry'] + 1})" if line["retry"] else ""
    if line["fate"] == "trained":
        return f"trained in step {line['step']}{tried}"
    return escape(f"dropped: {line['reason']}{tried}{', to be tried again' if line.get('retried') else ''}")


def _print_summary(summary: Summary, console: Console) -> None:
    console.print(
        f"{summary.all.closed} groups are closed: {_split(summary.all)}; {summary.retried} were retries; "
        f"{summary.continued} have answers that were cut off and continued\n",
        soft_wrap=True,
    )
    table = plain_table("", "published", "trained", right=("published", "trained"), title="means")
    for name, (of_all, of_trained) in summary.means.items():
        table.add_row(MEANS[name], _shown(of_all.value), _shown(of_trained.value))
    console.print(table, "")
    for dimension, buckets in summary.by.items():
        counts = ("published", "of all", "trained", "of all trained")
        table = plain_table("", *counts, "dropped", right=counts, title=f"by {dimension}")
        for label, bucket in buckets.items():
            table.add_row(
                label,
                str(bucket.closed),
                _share(bucket.closed, summary.all.closed),
                str(bucket.trained),
                _share(bucket.trained, summary.all.trained),
                _reasons(bucket),
            )
        console.print(table, "")


def _print_prompts(record: PromptRecord, curriculum: CurriculumConfig, console: Console) -> None:
    """Print a table of the number of tried prompts by pass rate."""
    counts = ("prompts", "of all tried")
    table = plain_table("pass rate", *counts, right=counts, title="prompts tried")
    for bucket, count in enumerate(record.histogram):
        if count:
            rates = f"{bucket / BUCKETS:g} to {(bucket + 1) / BUCKETS:g}"
            table.add_row(rates, str(count), _share(count, record.tried))
    console.print(table)
    if curriculum.chooses:
        console.print(
            f"{record.solved} solved and {record.too_hard} too hard prompts are left out; "
            f"{record.visits['replay']} groups were replays, {record.visits['retest']} re-tests",
            soft_wrap=True,
        )


def _split(bucket: GroupTally) -> str:
    return f"{bucket.trained} trained, {bucket.closed - bucket.trained} dropped ({_reasons(bucket) or 'none'})"


def _reasons(bucket: GroupTally) -> str:
    counts = sorted(bucket.reasons.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {reason}" for reason, count in counts if count)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else ""


def _shown(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if not isinstance(value, float):
        return escape(str(value))
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
