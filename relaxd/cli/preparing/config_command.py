"""`relaxd config`: show and check a configuration."""

import os
from typing import Annotated

import typer

from relaxd.amounts import byte_amount
from relaxd.cli.options import DEFAULT_STATE, PASS_ON, WordsArgument, load_words, new_console
from relaxd.cli.output import show
from relaxd.cli.preparing.check import check, check_algorithm
from relaxd.cli.preparing.doctor_command import PREFLIGHT_SECONDS, scope_of, warn_of_machine
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError
from relaxd.config.write_toml import dump_changes, dump_explained
from relaxd.fitting.fit import written
from relaxd.local.devices import check_devices
from relaxd.models import DataError
from relaxd.replica.gpus import visible_gpus

config_app = typer.Typer(help="Show or check a configuration.", no_args_is_help=True)


@config_app.command("show", context_settings=PASS_ON)
def config_show(
    words: WordsArgument,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from the defaults.")] = False,
) -> None:
    """Print every setting with its meaning, as TOML."""
    _, config = load_words(words)
    show(dump_changes(config) if diff else dump_explained(config), end="")


@config_app.command("check", context_settings=PASS_ON)
def config_check(words: WordsArgument) -> None:
    """Check a configuration against itself, the model, the data, the reward and this machine. Starts no service."""
    path, config = load_words(words)
    problems = check_algorithm(config)
    if problems := problems or check(config) + check_devices(config, {}, len(visible_gpus())):
        raise ConfigError(problems)
    show(f"{path} is valid")
    show(_disk(config))
    scope = scope_of(DEFAULT_STATE, config, os.environ.get("RELAXD_COORDINATOR"), PREFLIGHT_SECONDS)
    if not warn_of_machine("config", scope, new_console()):
        raise typer.Exit(1)


def _disk(config: RunConfig) -> str:
    """Say what a run will write."""
    try:
        found = written(config)
    except DataError as error:
        return f"what it will write is not known: {error}"
    parts = "; ".join(f"{name}: {byte_amount(size)}" for name, size in found.items())
    return f"the run's folder will take about {byte_amount(sum(found.values()))} ({parts})"
