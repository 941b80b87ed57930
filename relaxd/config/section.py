"""Base of the configuration's sections."""

import json
from collections.abc import Iterable, Iterator
from typing import ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from relaxd.engines import ENGINES, engines_of, list_engines
from relaxd.importing import check_own

CONTINUING = ("= ", "+ ", "is ", "has ", "can't be ", "on ")
"""Beginnings of messages that continue a sentence whose subject is the setting's name."""


class Section(BaseModel):
    """A section of the configuration: immutable, with documented fields; unknown keys are errors."""

    # use_attribute_docstrings is off, because it costs every process 0.2 s at its start: `settings` reads docstrings.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    section: ClassVar[str]
    """Dotted name of the section, for messages."""

    def problems(self) -> Iterator[str]:
        """Yield the contradictions between settings, each a sentence that names them. The first one invalidates the
        section. A section that inherits rules also yields `super().problems()`."""
        return iter(())

    @model_validator(mode="after")
    def _has_no_problem(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return which of these settings differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def unused(self, names: Iterable[str], reason: str) -> Iterator[str]:
        """Yield a problem for each of these settings that was set, though it has no effect: `reason` says why, and what
        to do."""
        for name in self.changed(names):
            yield f"{self.section}.{name} is {json.dumps(getattr(self, name), default=str)}, but {reason}"

    def of_other_engines(self, engine: str) -> Iterator[str]:
        """Yield a problem if a setting was changed that the section's engine lacks, but another engine has."""
        place = self.section
        others = dict.fromkeys(name for other in engines_of(place) for name in ENGINES[other].settings[place])
        if changed := self.changed(name for name in others if name not in ENGINES[engine].settings[place]):
            having = list_engines(place, lambda other: changed[0] in other.settings[place])
            yield (
                f'{place}.{changed[0]} is for {place}.engine = {having}, but {place}.engine is "{engine}": leave one '
                "of them out"
            )


def own_function(setting: str) -> AfterValidator:
    """Return a validator for a setting that may name a user's own function."""
    return AfterValidator(lambda name: name and check_own(setting, name, "function"))


def with_setting(setting: str, message: str) -> str:
    """Prefix a message with its setting's name: "run.steps = 0: ..." or "data.path: can't read ..."."""
    if not setting:
        return message
    return f"{setting}{' ' if message.startswith(CONTINUING) else ': '}{message}"
