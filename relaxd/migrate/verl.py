"""verl's settings as relaxd's. relaxd.config.names.other_frameworks has the names that mean the same."""

import re
from collections.abc import Mapping
from typing import Any

from relaxd.config.load_toml import ConfigError, load
from relaxd.config.names.other_frameworks import EQUIVALENTS, Equivalent
from relaxd.config.names.settings_table import settings
from relaxd.migrate.migrated import ACTOR, Lost, Migrated, Reader
from relaxd.migrate.verl_data import DATA, complete_data
from relaxd.migrate.verl_reasons import is_off, reason
from relaxd.migrate.verl_rewards import REWARDS, REWARDS_BY_PATTERN, complete_rewards
from relaxd.migrate.verl_tools import add_tools
from relaxd.migrate.verl_training import TRAINING, algorithm_of, complete_training

_NAMES: dict[str, Equivalent] = {name: one for one in reversed(EQUIVALENTS) for name in one.names["verl"]}
_CONVERSIONS = TRAINING | DATA | REWARDS
"""Conversions of verl's options beyond renaming, by their names without actor_rollout_ref."""
_TABLES = {
    "rollout.engine_kwargs.sglang": "rollout.sglang",
    "data.apply_chat_template_kwargs": "model.chat_template_arguments",
}
"""verl's tables that are tables here, too: a script sets their keys one by one."""


def migrate(given: Mapping[str, Any]) -> Migrated:
    """Convert verl's settings, by dotted name. `Migrated.fates` says of every key what became of it."""
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
    """Add a key, or all of a table."""
    found = {key: value} if key else dict(value or {})
    if given := {name: one for name, one in found.items() if one is not None}:
        reader.out.values[setting] = reader.out.values.get(setting, {}) | given
        reader.set(setting, reader.out.values[setting])
