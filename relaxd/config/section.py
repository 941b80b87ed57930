"""Base of the configuration's sections."""

import json
from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict

from relaxd.engines import ENGINES, engines_of, list_engines

CONTINUING = ("= ", "+ ", "is ", "has ", "can't be ", "on ")
"""Beginnings of messages that go on with the sentence that the name of a setting begins."""


class Section(BaseModel):
    """A section of the configuration: immutable, with documented fields; unknown keys are errors."""

    # Without use_attribute_docstrings, which costs every process 0.2 s at its start: `settings` reads them.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return which of these settings differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]


def with_setting(setting: str, message: str) -> str:
    """Return a message about a setting, behind its name: "run.steps = 0: ..." or "data.path: can't read ..."."""
    if not setting:
        return message
    return f"{setting}{' ' if message.startswith(CONTINUING) else ': '}{message}"


def refuse_unused(section: Section, place: str, names: Iterable[str], reason: str) -> None:
    """Refuse settings that count for nothing, unless they are as by default.

    Args:
        section: the section.
        place: its name.
        names: its settings that don't count.
        reason: why, and what to do.

    Raises ValueError: one of them was set to something else.
    """
    for name in section.changed(names):
        value = json.dumps(getattr(section, name), default=str)
        raise ValueError(f"{place}.{name} is {value}, but {reason}")


def refuse_of_other_engines(section: Section, place: str, engine: str) -> None:
    """Refuse settings that only other engines than the section's have, unless they are as by default.

    Raises ValueError: one of them was set to something else.
    """
    own = ENGINES[engine].settings[place]
    others = dict.fromkeys(name for other in engines_of(place) for name in ENGINES[other].settings[place])
    if changed := section.changed(name for name in others if name not in own):
        having = list_engines(place, lambda other: changed[0] in other.settings[place])
        raise ValueError(
            f'{place}.{changed[0]} is for {place}.engine = {having}, but {place}.engine is "{engine}": leave one of '
            "them out"
        )
