"""Example configurations, in a source tree or installed, and `relaxd init`, which copies one."""

import shlex
import shutil
import sysconfig
from pathlib import Path
from typing import Annotated

import typer

import relaxd
from relaxd.cli.output import show
from relaxd.client.errors import CliError

OWN_TASK = {"run.toml": "jsonl.toml", "prompts.jsonl": "prompts.jsonl", "reward.py": "reward.py"}
"""Files that `relaxd init` writes, and the examples that they are copies of."""

DEMO_SETTINGS: dict[str, tuple[str, ...]] = {
    # Answers have up to 12 tokens, not 1,024.
    "dr_grpo": ("--algorithm.constant_length", "12"),
    # The paper's limits are for answers of thousands of tokens, whose mean ratio hardly moves.
    "gspo": ("--algorithm.clip_low", "0.03", "--algorithm.clip_high", "0.04"),
    # Answers may be a step old, and it has no ratio of its own.
    "rloo": ("--algorithm.correction", "tis"),
    # Groups of equal rewards take part, so that a step teaches less.
    "reinforce_plus_plus": ("--run.steps", "32"),
}
"""Settings of `relaxd demo --algorithm NAME` that differ from the algorithm's defaults."""


def demo_overrides(algorithm: str) -> list[str]:
    """Return the words that make the demo train with an algorithm."""
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
