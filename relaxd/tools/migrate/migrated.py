"""The result of migrating another framework's configuration."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from relaxd.config.write_toml import toml

ACTOR = "actor_rollout_ref."
WIDTH = 116


class KeyFate(Enum):
    """The fate of a key."""

    WRITTEN = auto()
    """The key was converted to settings."""
    NOTED = auto()
    """The key is covered by a note."""
    LOST = auto()
    """The key has no equivalent."""
    IDLE = auto()
    """The key is off, or sets what relaxd does anyway."""


@dataclass
class Migrated:
    """A migrated configuration and the fate of each of its keys."""

    values: dict[str, Any] = field(default_factory=dict)
    """relaxd's settings by dotted name."""
    notes: list[str] = field(default_factory=list)
    """Notes on what a person must check."""
    lost: list[tuple[str, Any, str]] = field(default_factory=list)
    """Every key without an equivalent: its name, its value, and why."""
    idle: list[tuple[str, Any]] = field(default_factory=list)
    """Every key that is off, or sets what relaxd does anyway, with its value."""
    fates: dict[str, KeyFate] = field(default_factory=dict)
    """Outcome of every key."""
    problems: list[str] = field(default_factory=list)
    """Reasons why relaxd would refuse the settings."""

    def to_toml(self) -> str:
        """Return everything as TOML: settings, then notes, lost and idle keys as comments."""
        sections: dict[str, list[str]] = {}
        for name, value in self.values.items():
            section, _, key = name.rpartition(".")
            sections.setdefault(section, []).append(f"{key} = {toml(value)}")
        parts = ["\n".join([f"[{section}]", *lines]) for section, lines in sorted(sections.items())]
        reasons = dict.fromkeys(why for _, _, why in self.lost)
        lost = [
            "\n".join([f"{one}:", *(f"  {name} = {value!r}" for name, value, why in self.lost if why == one)])
            for one in reasons
        ]
        names = ", ".join(name for name, _ in self.idle)
        idle = textwrap.wrap(names, WIDTH, break_long_words=False, break_on_hyphens=False)
        for title, lines in (
            ("Look at this:", self.notes),
            ("relaxd refuses this until you change it:", self.problems),
            ("These keys have no equivalent:", lost),
            ("These keys are off, or say what relaxd does anyway:", idle),
        ):
            if lines:
                parts.append(
                    "\n".join(["# " + title, *(f"#   {line}" for text in lines for line in text.splitlines())])
                )
        return "\n\n".join(parts) + "\n"


class Lost(Exception):
    """A key's value has no equivalent; the message says why."""


class Reader:
    """Converts verl's settings key by key, and keeps the results."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.out = Migrated()
        self.key = ""
        """The key that is being converted."""
        self._fate = KeyFate.IDLE
        self._writers: dict[str, str] = {}
        """The key that wrote each setting."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, whose name may leave out actor_rollout_ref."""
        value = self.given.get(ACTOR + name, self.given.get(name))
        return default if value is None else value

    def first(self, *names: str) -> Any:
        """Return the value of the first of these keys with a value, because verl renames keys at times."""
        return next((value for name in names if (value := self.get(name)) not in (None, "", "???")), None)

    def begin(self, key: str) -> None:
        """Go on to the next key."""
        self.key, self._fate = key, KeyFate.IDLE

    def end(self) -> None:
        """Record the outcome of the current key: its settings, its notes, or neither."""
        self.out.fates[self.key] = self._fate
        if self._fate is KeyFate.IDLE:
            self.out.idle.append((self.key, self.given[self.key]))

    def lose(self, why: str) -> None:
        """Record that the key has no equivalent."""
        self.out.fates[self.key] = KeyFate.LOST
        self.out.lost.append((self.key, self.given[self.key], why))

    def set(self, name: str, value: Any) -> None:
        """Write a setting. If two keys give it different values, add a note."""
        before = self.out.values.get(name)
        if before is not None and before != value and (writer := self._writers.get(name)) not in (None, self.key):
            self.out.notes.append(f"{name}: {toml(value)} of {self.key}, and not {toml(before)} of {writer}")
        self.out.values[name] = value
        if self.key:
            self._writers[name] = self.key
        self._fate = KeyFate.WRITTEN

    def note(self, text: str) -> None:
        """Add a note."""
        if text not in self.out.notes:
            self.out.notes.append(text)
        if self._fate is KeyFate.IDLE:
            self._fate = KeyFate.NOTED


def listed(value: Any) -> list[str]:
    """Return a list of texts from one text, a list, or nothing."""
    return [value] if isinstance(value, str) else [str(one) for one in value or ()]
