"""`relaxd migrate`: configurations of other frameworks as relaxd's."""

from pathlib import Path
from typing import Annotated

import typer

from relaxd.cli.output import show
from relaxd.client.errors import CliError
from relaxd.migrate.verl import migrate
from relaxd.migrate.verl_source import VerlConfigError, read_verl

migrate_app = typer.Typer(help="Convert a configuration of another framework.", no_args_is_help=True)


@migrate_app.callback()
def _root() -> None:
    """Require the word `verl`, although it is the only command."""


@migrate_app.command("verl")
def migrate_verl(
    config: Annotated[Path, typer.Argument(help="A YAML file, or a script that calls verl with overrides.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as for verl.")
    ] = None,
) -> None:
    """Print the configuration as TOML, and every key that has no equivalent as a comment."""
    try:
        show(migrate(read_verl(config, overrides or [])).to_toml(), end="")
    except VerlConfigError as error:
        raise CliError(str(error)) from error
