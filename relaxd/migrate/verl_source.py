"""Reading of verl's configurations: hydra YAML, scripts with dotted overrides, and overrides on the command line."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECTIONS = (
    *(
        "actor_rollout_ref",
        "data",
        "algorithm",
        "trainer",
        "critic",
        "reward_model",
        "reward",
        "custom_reward_function",
    ),
    *("global_profiler", "ray_kwargs", "ray_init", "transfer_queue"),
)
"""verl's sections."""
OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(SECTIONS)})(?:\.[\w@/-]+)+)=(.*)", re.DOTALL)
"""A hydra override of verl. Other assignments in a script are its own."""


class VerlConfigError(ValueError):
    """A configuration of verl that can't be read."""


def read_verl(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the settings of a verl configuration by dotted name.

    `path` is a YAML file, or a script that calls verl with overrides; `overrides` are words such as
    "actor_rollout_ref.rollout.n=8", which win. Interpolations (${...}) of other keys are resolved, variables of a
    script aren't. Raises VerlConfigError.
    """
    try:
        import yaml
    except ImportError as error:
        raise VerlConfigError(f"{error}: pip install 'relaxd[migrate]'") from error
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerlConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    try:
        if path.suffix in (".yaml", ".yml"):
            tree = yaml.safe_load(text)
            if not isinstance(tree, dict):
                raise VerlConfigError(f"{path} holds a {type(tree).__name__}: it must be a mapping of sections")
            found = dict(_leaves(tree))
        else:
            found = _assignments(shlex.split(text, comments=True), yaml.safe_load)
            if not found:
                raise VerlConfigError(f"{path} has no override such as actor_rollout_ref.rollout.n=8, and isn't YAML")
        given = _assignments(overrides, yaml.safe_load)
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, VerlConfigError) else VerlConfigError(f"{path}: {error}") from error
    if len(given) != len(overrides):
        wrong = next(word for word in overrides if not OVERRIDE.fullmatch(word))
        raise VerlConfigError(f"{wrong!r} is no override of verl: write it as actor_rollout_ref.rollout.n=8")
    found |= given
    return {name: _number(_resolved(value, found)) for name, value in found.items()}


def _assignments(words: Sequence[str], parse: Any) -> dict[str, Any]:
    matches = [OVERRIDE.fullmatch(word.strip()) for word in words]
    return {match[1]: parse(match[2]) if match[2] else "" for match in matches if match}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not name.endswith("reward_kwargs"):
            yield from _leaves(value, f"{name}.")
        elif name != "defaults":  # hydra's list of files to compose with
            yield name, value


def _resolved(value: Any, found: Mapping[str, Any], depth: int = 0) -> Any:
    """Return the value that an interpolation such as ${data.train_batch_size} stands for."""
    match = re.fullmatch(r"\$\{(?:oc\.select:)?([\w.]+)(?:,\s*(.*))?\}", value) if isinstance(value, str) else None
    if match is None or depth > 10:
        return value
    return _resolved(found[match[1]], found, depth + 1) if match[1] in found else match[2] or value


def _number(value: Any) -> Any:
    """YAML 1.1, which PyYAML reads, has 1e-6 as a text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value
