"""Options and arguments shared by commands."""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from relaxd.cli.output import EscapingConsole
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem, load_file
from relaxd.models import DataError
from relaxd.roles import ROLES, SCALABLE_ROLES

StateOption = Annotated[
    Path, typer.Option("--state", envvar="RELAXD_STATE", help="Folder of the services' state, logs and data.")
]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        envvar="RELAXD_COORDINATOR",
        help="Coordinator's host:port; default: that of the services up here.",
    ),
]
KeepUpOption = Annotated[bool, typer.Option("--keep-up", help="Keep the services up afterwards.")]
ConsoleOption = Annotated[
    bool,
    typer.Option(
        "--console/--no-console",
        envvar="RELAXD_CONSOLE",
        help="Serve a web page that shows what runs do, at a URL here.",
    ),
]
RunIdOption = Annotated[str, typer.Option("--run-id", help="Id of the run, and name of its folder.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id or folder; default: the newest.", show_default=False)
]
ActiveRunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id; default: the active one.", show_default=False)
]
ResumedRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="[RUN]",
        help="The run's id; default: the active one, or without services the newest that has not ended.",
        show_default=False,
    ),
]
RunNameArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="The run's folder; default: runs/RUN.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, shown with the run.")]
WordsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE.toml [--section.key VALUE]...", help="Configuration file, then settings that override it."
    ),
]
DEFAULT_STATE = Path(".relaxd")
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": False}
"""Typer's context settings of commands that take a configuration file and settings as free words."""


def console_wanted() -> bool:
    """Return True unless RELAXD_CONSOLE turns the console off; for commands without an option for that."""
    return os.environ.get("RELAXD_CONSOLE", "").lower() not in ("0", "no", "off", "false")


def new_console() -> Console:
    """Return a console for output, with colours if it is a terminal and not in CI."""
    # A live display would flood CI logs with control characters; a model's text may look like markup.
    return EscapingConsole(force_terminal=False if os.environ.get("CI") else None, highlight=False, markup=False)


def with_replica_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `replicas` with one option per scalable role. `replicas` gets the options given."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        counts = {role: given.pop(role) for role in SCALABLE_ROLES}
        command(replicas={role: count for role, count in counts.items() if count is not None}, **given)

    parameters = dict(inspect.signature(command).parameters)
    del parameters["replicas"]
    for role in SCALABLE_ROLES:
        least = ROLES[role].replicas
        most = ROLES[role].most or None
        meaning = f"{role.capitalize()} replicas to start; default: the run's placement, or else {least}."
        option = typer.Option(f"--{role}", min=least, max=most, help=meaning)
        parameters[role] = inspect.Parameter(
            role, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[int | None, option]
        )
    with_options.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    with_options.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return with_options


@contextmanager
def data_errors() -> Iterator[None]:
    """Convert each DataError to a ConfigError that names the setting."""
    try:
        yield
    except DataError as error:
        raise ConfigError([Problem(error.field, error.message)]) from error


def load_words(words: list[str]) -> tuple[Path, RunConfig]:
    """Load the configuration that a command's words name: a file, and settings that override it. Returns both.

    Raises CliError, ConfigError.
    """
    path, overrides = split_words(words)
    return path, load_file(path, overrides)


def split_words(words: list[str]) -> tuple[Path, list[str]]:
    """Split a command's words into the configuration file and settings. Raises CliError unless they name one file."""
    files: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            files.append(word)
        elif "=" in word or not rest:
            overrides.append(word)
        else:
            overrides += [word, rest.pop(0)]
    if len(files) != 1:
        found = " and ".join(files) if files else "none"
        raise CliError(f"expected one configuration file, found {found}", "give settings as --section.key VALUE")
    return Path(files[0]), overrides
