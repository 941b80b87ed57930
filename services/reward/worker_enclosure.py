"""The enclosure of reward workers: what they may access, and their environment. Both follow from the run's
configuration and this service's settings. Workers run users' code, so they get no secrets of the service.
"""

import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from relaxd.config import RewardConfig
from relaxd.rpc.service_settings import SECRET_FILES
from relaxd.sandbox.enclosure import Measure, Plan

NEEDED = ("network", "files", "memory", "processes")
"""Names of the measures that reward.sandbox = "required" demands, unless the run's settings waive them."""


class MissingPathError(Exception):
    """reward.writable names a path that doesn't exist on this machine."""


def plan_of(
    config: RewardConfig,
    environment: Mapping[str, str],
    secret_files: Sequence[str] = (),
    others: Sequence[RewardConfig] = (),
) -> Plan:
    """Return the enclosure plan for workers with this environment.

    `config` decides what workers may do; `others` are further rewards that they load. `secret_files` are this service's
    files with secrets, besides those named in its environment.

    Raises MissingPathError.
    """
    if missing := [path for path in config.writable if not os.path.exists(path)]:
        raise MissingPathError(
            f"reward.writable names {', '.join(missing)}, not on the reward service's machine: make it there first"
        )
    needed = {path for path in _needed_paths([config, *others], environment) if os.path.exists(path)}
    variables = (os.environ.get(f"RELAXD_{name.upper()}", "") for name in SECRET_FILES)
    secrets = {os.path.realpath(file) for file in (*secret_files, *variables) if file}
    return Plan(
        network=config.network,
        memory_bytes=config.worker_memory_bytes,
        writable=tuple(map(os.path.abspath, config.writable)),
        hidden=tuple(sorted(_with_their_folder(file, (*needed, *config.writable)) for file in secrets)),
        needed=tuple(sorted(needed)),
    )


def missing_of(measures: Sequence[Measure]) -> list[Measure]:
    """Return the measures that reward.sandbox = "required" demands and that aren't enforced."""
    return [one for one in measures if one.name in NEEDED and not one.by]


def describe_enclosure(measures: Sequence[Measure]) -> str:
    """Return one line that says in what workers are limited, and in what they are not."""
    held = ", ".join(f"{one.name} ({one.by})" for one in measures if one.by)
    missing = "; ".join(f"{one.name}: {one.missing}" for one in measures if not one.by)
    return f"reward workers are limited in {held or 'nothing'}" + (f"; not in {missing}" if missing else "")


def _needed_paths(configs: Sequence[RewardConfig], environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the paths that rewards read: their modules, and the files named by their settings and environment."""
    yield from (os.getcwd(), sys.prefix, sys.base_prefix, *filter(None, sys.path))
    yield from environment.get("PYTHONPATH", "").split(os.pathsep)
    yield os.path.join(environment.get("HOME", "/"), ".cache/huggingface")
    named = [value for name, value in environment.items() if name not in ("HOME", "TMPDIR")]
    for text in _texts([named, *(one.model_dump() for one in configs)]):
        if text.startswith("/") and "\0" not in text:
            yield from (text, text.rpartition(":")[0])  # a reward's name is "/path/of/file.py:function"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for one in value.values() for text in _texts(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in _texts(one))


def _with_their_folder(file: str, used: Sequence[str]) -> str:
    """Return a secret file's folder if only its owner may enter it and no path in `used` is inside; otherwise the file
    itself."""
    folder = os.path.dirname(file)
    try:
        status = os.stat(folder)
    except OSError:
        return file
    private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and folder != os.path.expanduser("~")
    in_use = any(f"{os.path.realpath(path)}/".startswith(f"{folder}/") for path in used)
    return folder if private and not in_use else file


PASSED = frozenset(
    (
        *("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "XDG_CACHE_HOME"),
        *("LANG", "LANGUAGE", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "TRANSFORMERS_OFFLINE"),
    )
)
"""Names of the environment variables that every worker gets. Proxies are omitted, because their URLs may contain a
password."""
PASSED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_")


class MissingVariableError(Exception):
    """reward.environment names a variable that is not set in the reward service."""


def worker_environment(variables: Sequence[str]) -> dict[str, str]:
    """Return the environment of a worker: the usual variables, and those that reward.environment names.

    Raises MissingVariableError when one of `variables` is not set.
    """
    if missing := [name for name in variables if name not in os.environ]:
        raise MissingVariableError(
            f"reward.environment names {', '.join(missing)}, not set in the reward service's environment: set it where "
            "that service is started"
        )
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith(PASSED_PREFIXES) or name in variables
    }
    return passed | {"PYTHONUNBUFFERED": "1"}  # a worker is killed in the end: what a reward has printed isn't lost
