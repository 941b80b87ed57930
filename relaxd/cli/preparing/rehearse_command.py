"""`relaxd rehearse`: a run at its real size, without its GPUs."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from relaxd.cli.execute import with_absolute_paths
from relaxd.cli.options import WordsArgument, load_words, new_console
from relaxd.client.errors import CliError
from relaxd.rehearsal.assumptions import Scale, obstacle, payload_scale
from relaxd.rehearsal.rehearse import rehearse as run_rehearsal
from relaxd.rehearsal.report import Measured, rows

MEMORY_SHARE = 8
"""Payloads are scaled down to an eighth of this machine's free memory: Redis, trainer and engines each have some."""


def rehearse(
    words: WordsArgument,
    rollout: Annotated[int, typer.Option(min=1, max=4096, help="Rollout replicas to rehearse with.")] = 64,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds to measure, after the first step.")] = 120.0,
    time_scale: Annotated[
        float, typer.Option(min=1, help="Generation, training and weights take this many times less than stated.")
    ] = 60.0,
    payload: Annotated[
        int,
        typer.Option(
            "--payload-scale",
            min=0,
            help="Answers have this many times fewer tokens; 1: true bytes; 0: as many as this machine's memory needs.",
        ),
    ] = 0,
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Ranks of the trainer, all data-parallel.")] = 1,
) -> None:
    """Rehearse a run at its real size without GPUs: would it fill its steps, and what is its first limit?"""
    path, config = load_words(words)
    console = new_console()
    if problem := obstacle(config):
        raise CliError(f"{path} can't be rehearsed: {problem}")
    config = with_absolute_paths(config)
    payload = payload or payload_scale(config, psutil.virtual_memory().available // MEMORY_SHARE)
    scale = Scale(rollout, time_scale, payload, ranks)
    logs = Path(f"rehearsal-{path.stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-logs")

    def say(text: str) -> None:
        console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    say(f"{path}: {rollout} rollout replicas, time / {time_scale:g}, payloads / {payload}, {ranks} trainer rank(s)")
    found = run_rehearsal(config, scale, seconds, say, logs.resolve())
    _print(path, found, console)


def _print(path: Path, found: Measured, console: Console) -> None:
    steps = f"steps {found.first.step + 1} to {found.last.step}"
    table = Table(
        title=f"rehearsal of {path.name}: {steps}, {found.wall_seconds:.0f} s",
        title_justify="left",
        show_header=False,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(found):
        table.add_row(name, value)
    console.print(table)
