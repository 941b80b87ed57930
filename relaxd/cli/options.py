"""Options and arguments shared by commands."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from relaxd.client.errors import CliError
from relaxd.config import RunConfig
from relaxd.config.load import load_file

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
RunIdOption = Annotated[str, typer.Option("--run-id", help="Id of the run, and name of its folder.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id; default: the newest.", show_default=False)
]
ActiveRunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id; default: the active one.", show_default=False)
]
RunNameArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="The run's folder; default: runs/RUN.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Reason, shown with the run.")]
RolloutOption = Annotated[int, typer.Option("--rollout", min=1, help="Rollout replicas to start.")]
RewardOption = Annotated[int, typer.Option("--reward", min=1, help="Reward replicas to start.")]
AdvantageOption = Annotated[int, typer.Option("--advantage", min=1, help="Advantage replicas to start.")]
WordsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE.toml [--section.key VALUE]...", help="Configuration file, then settings that override it."
    ),
]
DEFAULT_STATE = Path(".relaxd")
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": False}
"""Context settings of commands that take `WordsArgument`."""


def new_console() -> Console:
    """Make a console with colours on a terminal."""
    # A live display would flood CI logs with control characters; a model's text may look like markup.
    return Console(force_terminal=False if os.environ.get("CI") else None, highlight=False, markup=False)


def load_words(words: list[str]) -> tuple[Path, RunConfig]:
    """Load the configuration that `WordsArgument` names. Returns its path and it. Raises CliError, ConfigError."""
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
    path = Path(files[0])
    return path, load_file(path, overrides)
