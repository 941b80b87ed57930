"""What workers may do: the plan of their enclosure, from the run's configuration and this service's own settings."""

import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relaxd.config import RewardConfig
from relaxd.rpc.settings import SECRET_FILES
from relaxd.sandbox.enclosure import PRIVATE, Measure, Plan

NEEDED = ("network", "files", "memory", "processes")
"""What reward.sandbox = "required" asks for."""
LONGEST_PATH = 4096
_LISTS = ("LD_LIBRARY_PATH", "PYTHONPATH")
_NO_PATHS = ("HOME", "TMPDIR", "SHELL", "PATH")
"""Variables whose paths a worker does without."""
_IN_HOME = (".cache/huggingface", "nltk_data")
"""Where libraries of rewards look for their data."""


class MissingPathError(Exception):
    """reward.writable names what does not exist on this machine."""


def plan_of(
    config: RewardConfig,
    environment: Mapping[str, str],
    secret_files: Sequence[str] = (),
    others: Sequence[RewardConfig] = (),
) -> Plan:
    """Return the plan for workers with this environment.

    `config` decides what they may do; `others` are further rewards that they load. `secret_files` are this service's
    files with secrets, besides those that its own environment names.

    Raises MissingPathError.
    """
    if missing := [path for path in config.writable if not os.path.exists(path)]:
        raise MissingPathError(
            f"reward.writable names {', '.join(missing)}, not on the reward service's machine: make it there first"
        )
    readable = sorted({os.path.abspath(path) for path in _needed_paths([config, *others], environment)})
    variables = (os.environ.get(f"RELAXD_{name.upper()}", "") for name in SECRET_FILES)
    secrets = {os.path.realpath(file) for file in (*secret_files, *variables) if file}
    return Plan(
        network=config.network,
        memory_bytes=config.worker_memory_bytes,
        readable=tuple(readable),
        writable=tuple(map(os.path.abspath, config.writable)),
        hidden=tuple(sorted(_with_their_folder(file, (*readable, *config.writable)) for file in secrets)),
    )


def describe(measures: Sequence[Measure]) -> str:
    """Return how workers are enclosed, in one line."""
    held = ", ".join(f"{one.name} ({one.by})" for one in measures if one.by)
    missing = "; ".join(f"{one.name}: {one.missing}" for one in measures if not one.by)
    return f"reward workers are limited in {held or 'nothing'}" + (f"; not in {missing}" if missing else "")


def _needed_paths(configs: Sequence[RewardConfig], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield what rewards read: their modules, their settings' files, and what their environment names."""
    yield from (os.getcwd(), sys.prefix, sys.base_prefix, *filter(None, sys.path))
    for name, value in environment.items():
        paths = value.split(os.pathsep) if name in _LISTS else [value]
        if name not in _NO_PATHS:
            yield from (folder for path in paths for folder in _folders(path))
    home = environment.get("HOME", "/")
    yield from (os.path.join(home, name) for name in _IN_HOME)
    for text in _texts([one.model_dump(exclude={"writable"}) for one in configs]):
        file = text.rpartition(":")[0]
        if file.endswith(".py"):
            yield os.path.dirname(os.path.abspath(file))
        else:
            yield from _folders(text)


def _folders(text: str) -> Iterator[str]:
    """Yield the folder that a path means, or that the file is in: a file may come later, or be replaced."""
    if not text.startswith("/") or "\0" in text or len(text) > LONGEST_PATH:
        return
    folder = os.path.dirname(text)
    if os.path.isdir(text):
        yield text
    elif folder not in ("/", *PRIVATE) and os.path.isdir(folder):
        yield folder
    elif os.path.exists(text):
        yield text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in _texts(one))


def _with_their_folder(file: str, used: Sequence[str]) -> str:
    """Return the folder of a secret if only its owner may enter it and it has nothing else in use, or else the file."""
    folder = os.path.dirname(file)
    try:
        status = os.stat(folder)
    except OSError:
        return file
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and folder != os.path.expanduser("~")
    in_use = any(os.path.realpath(path).startswith(folder + "/") or os.path.realpath(path) == folder for path in used)
    return folder if private and not in_use else file
