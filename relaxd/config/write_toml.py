"""Configurations as TOML: in full, with the meaning of each setting, or only the differences from defaults."""

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from relaxd.config.algorithm import tag_of
from relaxd.config.run import RunConfig
from relaxd.config.settings_table import Place, Setting, plain, sections, settings

COMMENT_WIDTH = 100
Lines = Callable[[Setting, Any], list[str]]
"""Function that writes a setting and its value as lines of TOML. It returns no lines for a setting to leave out."""
DERIVED: Mapping[Place, Callable[[RunConfig], int]] = {
    ("trainer", "micro_batch_tokens"): lambda config: config.micro_batch_tokens
}
"""Functions that return the value used for a setting of 0, by the setting's path."""


def dump(config: RunConfig) -> str:
    """Write the configuration as TOML; `load(dump(config)) == config`. Settings that are None are left out."""
    return _write(config, lambda setting, value: [] if value is None else [_assign(setting, value)])


def dump_explained(config: RunConfig) -> str:
    """Write the configuration as TOML, like `dump`, with the meaning of each section and setting as a comment. Unset
    settings become comments, too."""

    def lines(setting: Setting, value: Any) -> list[str]:
        meaning = ["", *_comment(setting.meaning)]
        if setting.place in DERIVED and not value:
            return [*meaning, f"{_assign(setting, value)}  # {DERIVED[setting.place](config)} in this run"]
        if value is None:
            return [*meaning, f"# {setting.place[-1]} is not set"]
        return [*meaning, _assign(setting, value) + ("" if setting.required else _default(setting, value))]

    return _write(config, lines, sections(_algorithm(config)))


def dump_changes(config: RunConfig) -> str:
    """Write the configuration as TOML: only required settings and settings that differ from their default, which is
    added as a comment."""

    def lines(setting: Setting, value: Any) -> list[str]:
        if value is None or (value == setting.default and not setting.required):
            return []
        return [_assign(setting, value) + ("" if setting.required else _default(setting, value))]

    return _write(config, lines)


def _write(config: RunConfig, lines: Lines, meanings: Mapping[Place, str] | None = None) -> str:
    written: list[str] = []
    algorithm = _algorithm(config)
    for section in sections(algorithm):
        known = [setting for place, setting in settings(algorithm).items() if place[:-1] == section]
        body = [line for setting in known for line in lines(setting, _value(config, setting.place))]
        if body:
            written += ["", *(_comment(meanings[section]) if meanings else []), f"[{'.'.join(section)}]", *body]
    return "\n".join(written).strip() + "\n"


def _algorithm(config: RunConfig) -> str:
    tag = tag_of(config.algorithm)
    assert tag is not None, "every section of an algorithm has a name"
    return tag


def _value(config: RunConfig, place: Place) -> Any:
    return plain(reduce(getattr, place, config))


def _assign(setting: Setting, value: Any) -> str:
    return f"{setting.place[-1]} = {toml(value)}"


def _default(setting: Setting, value: Any) -> str:
    if value == setting.default:
        return ""
    return f"  # default: {'not set' if setting.default is None else toml(setting.default)}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def toml(value: Any) -> str:
    """Write a value as TOML, leaving out table entries that are None."""
    if isinstance(value, Mapping):
        entries = [f"{_key(key)} = {toml(item)}" for key, item in value.items() if item is not None]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    if isinstance(value, str):
        if "\n" in value and "'''" not in value and value.replace("\n", "").isprintable():
            return f"'''\n{value}'''"
        # TOML's basic strings are JSON's, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)
