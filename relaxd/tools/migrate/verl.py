"""verl's configurations: hydra YAML, scripts and command lines with dotted overrides, read and converted to relaxd's
settings.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relaxd.config.load_toml import ConfigError, load
from relaxd.config.other_frameworks import EQUIVALENTS, Equivalent
from relaxd.config.settings_table import settings
from relaxd.tools.migrate.key_fates import ACTOR, Lost, Migrated, Reader, is_off, reason
from relaxd.tools.migrate.verl_data import DATA, complete_data
from relaxd.tools.migrate.verl_rewards import REWARDS, REWARDS_BY_PATTERN, add_tools, complete_rewards
from relaxd.tools.migrate.verl_training import TRAINING, algorithm_of, complete_training

_NAMES: dict[str, Equivalent] = {name: one for one in reversed(EQUIVALENTS) for name in one.names["verl"]}
_CONVERSIONS = TRAINING | DATA | REWARDS
"""Conversions of verl's options beyond renaming, by their names without actor_rollout_ref."""
_TABLES = {
    "rollout.engine_kwargs.sglang": "rollout.sglang",
    "data.apply_chat_template_kwargs": "model.chat_template_arguments",
}
"""relaxd's table by verl's table with the same keys; scripts set the keys one by one."""


def migrate(given: Mapping[str, Any]) -> Migrated:
    """Convert verl's settings, by dotted name. `Migrated.fates` has the outcome of every key."""
    reader = Reader(given)
    reader.set("algorithm.name", algorithm_of(reader))
    reader.set("data.source", "files")
    reader.set("data.answer_key", "reward_model.ground_truth")
    for name, value in given.items():
        reader.begin(name)
        try:
            _convert(reader, name, value)
        except Lost as why:
            reader.lose(str(why))
        except (TypeError, ValueError, ZeroDivisionError):
            reader.lose("it isn't the number that is needed: variables are not resolved")
        else:
            reader.end()
    reader.begin("")
    complete_training(reader)
    complete_data(reader)
    complete_rewards(reader)
    add_tools(reader)
    try:
        load(reader.out.to_toml())
    except ConfigError as error:
        reader.out.problems = [str(problem) for problem in error.problems]
    return reader.out


def _convert(reader: Reader, name: str, value: Any) -> None:
    short = name.removeprefix(ACTOR)
    if is_off(reader, short):
        return
    if short in _CONVERSIONS:
        _CONVERSIONS[short](reader, value)
        return
    for pattern, convert in REWARDS_BY_PATTERN:
        if match := re.fullmatch(pattern, short):
            convert(reader, value, match[match.lastindex or 0])
            return
    for table, setting in _TABLES.items():
        if short == table or short.startswith(f"{table}."):
            _into_table(reader, setting, short.removeprefix(table).removeprefix("."), value)
            return
    equivalent = _NAMES.get(name)
    if (value is None or value in ("", "null", [], {})) and not name.startswith("~"):
        return  # verl's default, which is off
    if equivalent is None or not equivalent.setting:
        raise Lost((equivalent.note if equivalent else "") or reason(short))
    place = tuple(equivalent.setting.split("."))
    if place not in settings(reader.out.values["algorithm.name"]):
        raise Lost(f"{equivalent.setting} is not a setting of algorithm.name = {reader.out.values['algorithm.name']!r}")
    if isinstance(value, str) and "$" in value:
        reader.note(f"{equivalent.setting}: {value} has variables, which are not resolved")
    reader.set(equivalent.setting, value)


def _into_table(reader: Reader, setting: str, key: str, value: Any) -> None:
    """Add one key, or all keys, of a verl table to a setting that is a table."""
    found = {key: value} if key else dict(value or {})
    if given := {name: one for name, one in found.items() if one is not None}:
        reader.out.values[setting] = reader.out.values.get(setting, {}) | given
        reader.set(setting, reader.out.values[setting])


OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w-]*(?:[.@/][\w@/-]+)+|model_engine)=(.*)", re.DOTALL)
"""A hydra override. Other assignments in a script are shell variables, whose names have no dots."""
_OTHERS = re.compile(r"(~[A-Za-z_][\w.@/-]*|--config-(?:name|path|dir))(?:=(.*))?", re.DOTALL)
"""Other words that hydra accepts: deletions, and the names of files."""
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([A-Za-z_][\w.]*)(?:,\s*([^{}]*?)\s*)?\}")
"""An interpolation, with an optional default."""


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
            words = shlex.split(text, comments=True)
            found = _assignments(words, yaml.safe_load)
            if not found:
                raise VerlConfigError(f"{path} has no override such as actor_rollout_ref.rollout.n=8, and isn't YAML")
            found |= _others(words)
        given = _assignments(overrides, yaml.safe_load)
    except RecursionError:
        raise VerlConfigError(f"{path} is nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, VerlConfigError) else VerlConfigError(f"{path}: {error}") from error
    if len(given) != len(overrides):
        wrong = next(word for word in overrides if not OVERRIDE.fullmatch(word))
        raise VerlConfigError(f"{wrong!r} is no override of verl: write it as actor_rollout_ref.rollout.n=8")
    found |= given
    return {name: _number(_resolved(value, found, yaml.safe_load)) for name, value in found.items()}


def _assignments(words: Sequence[str], parse: Any) -> dict[str, Any]:
    matches = [OVERRIDE.fullmatch(word.strip()) for word in words]
    return {match[1]: parse(match[2]) if match[2] else "" for match in matches if match}


def _others(words: Sequence[str]) -> dict[str, Any]:
    """Return hydra's arguments other than overrides, which are reported as lost."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if match := _OTHERS.fullmatch(word.strip()):
            separate = "" if match[1].startswith("~") else following
            found[match[1]] = separate if match[2] is None else match[2]
    return found


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and not name.endswith("reward_kwargs"):
            yield from _leaves(value, f"{name}.")
        elif name != "defaults" or value not in (["_self_"], ["ppo_trainer", "_self_"]):  # files that hydra adds
            yield name, value


def _resolved(value: Any, found: Mapping[str, Any], parse: Any, depth: int = 0) -> Any:
    """Return a value with interpolations such as ${data.train_batch_size} replaced by their values."""
    if not isinstance(value, str) or depth > 10:
        return value

    def one(match: re.Match[str]) -> Any:
        if match[1] in found:
            return _resolved(found[match[1]], found, parse, depth + 1)
        return match[0] if match[2] is None else parse(match[2])

    if match := _REFERENCE.fullmatch(value):
        return one(match)
    return _REFERENCE.sub(lambda match: str(one(match)), value)


def _number(value: Any) -> Any:
    """Return a text such as 1e-6 as a number: PyYAML's YAML 1.1 reads it as text."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        return float(value)
    return value
