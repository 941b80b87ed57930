"""`relaxd rehearse`: a run at its real size, without its GPUs."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from relaxd.cli.execute import with_absolute_paths
from relaxd.cli.options import DEFAULT_STATE, StateOption, WordsArgument, load_words, new_console
from relaxd.cli.output import sayer
from relaxd.cli.preparing.config_command import check_algorithm
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError
from relaxd.local.placement import placed_replicas, placement_problems
from relaxd.local.state_folder import StateFolder
from relaxd.roles import AGENT, ROLLOUT
from relaxd.tools.rehearsal.assumptions import Scale, held_bytes, obstacle, payload_scale
from relaxd.tools.rehearsal.capacity import refusal
from relaxd.tools.rehearsal.rehearsal_report import Measured, rows
from relaxd.tools.rehearsal.rehearse import rehearse as run_rehearsal

MEMORY_SHARE = 8
"""Ratio of this machine's free memory to the memory that payloads may take; Redis, trainer and engines hold copies."""


def rehearse(
    words: WordsArgument,
    rollout: Annotated[
        int,
        typer.Option(
            min=0,
            max=4096,
            help="Rollout replicas; 0: those of the services that are up here, or else of the run's placement.",
        ),
    ] = 0,
    agent: Annotated[
        int,
        typer.Option(
            min=0,
            max=256,
            help="Agent replicas, for a run with conversations; 0: as with --rollout.",
        ),
    ] = 0,
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
    state: StateOption = DEFAULT_STATE,
) -> None:
    """Rehearse a run at its real size without GPUs: would it fill its steps, and what is its first limit?

    Ctrl-C ends the measurement early, with a result if two steps have ended.
    """
    path, config = load_words(words)
    console = new_console()
    if problem := obstacle(config):
        raise CliError(f"{path} can't be rehearsed: {problem}")
    if problems := check_algorithm(config) or placement_problems(config, {}):
        raise ConfigError(problems)
    config = with_absolute_paths(config)
    free = psutil.virtual_memory().available
    fits = payload_scale(config, free // MEMORY_SHARE)
    if config.has_media and payload > 1:
        raise CliError(
            f"--payload-scale is {payload}, but {path} has media ({config.media_setting}), which can't be scaled: "
            "leave it out"
        )
    asked, payload = payload, payload or fits
    if (asked or config.has_media) and (held := held_bytes(config) / payload) > free / 2:
        raise CliError(
            f"--payload-scale {payload}: groups would take {held / 1e9:.1f} GB, and may take half of the "
            f"{free / 1e9:.1f} GB that this machine has free",
            f"--payload-scale {fits} fits" if fits > payload else "give a smaller --trainer.groups_per_step",
        )
    if agent and not config.agent.is_there:
        raise CliError(f"--agent is {agent}, but {path} has no section [agent]: leave it out")
    rollout = rollout or _own_replicas(config, state, ROLLOUT)
    agent = agent or (_own_replicas(config, state, AGENT) if config.agent.is_there else 0)
    scale = Scale(rollout, time_scale, payload, ranks, agent)
    logs = Path(f"rehearsal-{path.stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}-logs")
    say = sayer(console)
    agents = f", {agent} agent replicas" if agent else ""
    sizes = f"{rollout} rollout replicas{agents}, time / {time_scale:g}, payloads / {payload}, {ranks} trainer rank(s)"
    say(f"{path}: {sizes}")
    found = run_rehearsal(config, scale, seconds, say, logs.resolve())
    _print(path, found, console)
    if refused := refusal(found.load):
        raise CliError(f"no verdict on {path}: {refused}")


def _own_replicas(config: RunConfig, state: Path, role: str) -> int:
    """Return the number of replicas of a role that `relaxd run` would use on this machine."""
    if up := StateFolder(state).read():
        return max(1, sum(service.role == role for service in up.services))
    return placed_replicas(config, {})[role]


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
