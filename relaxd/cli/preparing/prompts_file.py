"""A file or folder with prompts in place of a configuration."""

import json
import re
from collections.abc import Callable
from pathlib import Path

from relaxd.cli.options import split_words
from relaxd.client.errors import CliError
from relaxd.config import RunConfig
from relaxd.config.load_toml import ConfigError, Problem, load, load_file
from relaxd.data.files.opening import LINES, TABLES, without_part
from relaxd.run_folder import HELD_OUT

CONFIGURATIONS = (".toml", "")
"""Endings of configurations; "": a pipe's, for example."""


def load_words_or_prompts(words: list[str], further: Callable[[Path], str]) -> RunConfig:
    """Load the configuration that the words name, or make one for a file or folder with prompts.

    Args:
        words: see `WordsArgument`.
        further: returns lines of TOML for such a file or folder: what a command needs besides its prompts.

    Raises:
        CliError: they name no file, or several, or one that is neither.
        ConfigError: the configuration is wrong, or no option names the model for the prompts.
    """
    path, overrides = split_words(words)
    ending = path.suffix.partition("@")[0]
    if not without_part(path).is_dir():
        if ending in CONFIGURATIONS:
            return load_file(path, overrides)
        if ending not in (*LINES, *TABLES):
            raise CliError(
                f"{path} is neither a configuration (.toml) nor a file with prompts ({', '.join((*LINES, *TABLES))})"
            )
    if not any(word.startswith("--model.path") for word in overrides):
        what = f"is missing: {path} has prompts and no configuration, so name the model that gets them"
        raise ConfigError([Problem("model.path", f"{what}: --model.path FOLDER_OR_NAME")])
    lines = ("run.steps = 1", 'data.source = "files"', f"data.path = {json.dumps(str(path))}", further(path))
    return load("\n".join(lines), overrides, name=str(path))


def set_of(path: Path) -> str:
    """Return the lines of an evaluation set that has all prompts of a file, and the file's name."""
    name = re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower()).lstrip("_.-")[:64]
    name = "prompts" if name in ("", HELD_OUT) else name
    return f"[[eval.sets]]\nname = {json.dumps(name)}\npath = {json.dumps(str(path))}"
