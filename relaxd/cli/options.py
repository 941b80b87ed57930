"""Options and arguments that several commands have."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

StateOption = Annotated[Path, typer.Option("--state", envvar="RELAXD_STATE", help="Where `relaxd up` keeps its state.")]
CoordinatorOption = Annotated[
    str | None,
    typer.Option(
        "--coordinator", envvar="RELAXD_COORDINATOR", help="host:port; default: the services that are up here."
    ),
]
KeepUpOption = Annotated[bool, typer.Option("--keep-up", help="Leave the services up afterwards.")]
RunIdOption = Annotated[str, typer.Option("--run-id", help="Name of the run and of its folder.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id; default: the newest.", show_default=False)
]
ActiveRunArgument = Annotated[
    str, typer.Argument(metavar="[RUN]", help="The run's id; default: the active one.", show_default=False)
]
RunNameArgument = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.", show_default=False)]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="The run's folder; default: runs/RUN.")]
ReasonOption = Annotated[str, typer.Option("--reason", help="Why; shown wherever the run is.")]
RolloutOption = Annotated[int, typer.Option("--rollout", min=1, help="Rollout replicas to start.")]
RewardOption = Annotated[int, typer.Option("--reward", min=1, help="Reward replicas to start.")]
AdvantageOption = Annotated[int, typer.Option("--advantage", min=1, help="Advantage replicas to start.")]
WordsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE.toml [--section.key VALUE]...", help="The configuration, and settings that override it."
    ),
]
DEFAULT_STATE = Path(".relaxd")


def new_console() -> Console:
    """A console for people: in colour on a terminal."""
    # In CI a live picture would be a flood of control characters. What models write may look like markup.
    return Console(force_terminal=False if os.environ.get("CI") else None, highlight=False, markup=False)
