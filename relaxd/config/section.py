"""Base class of the configuration's sections."""

import json
from collections.abc import Iterable, Iterator
from typing import ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from relaxd.engines import ENGINES, engines_of, list_engines
from relaxd.importing import check_own

CONTINUING = ("= ", "+ ", "is ", "has ", "can't be ", "on ")
"""First words of messages that follow a setting's name without a colon, because the name is the sentence's subject."""


class Section(BaseModel):
    """Base class of a configuration section: immutable, with documented fields; unknown keys are errors."""

    # use_attribute_docstrings is off, because it costs every process 0.2 s at its start: `settings` reads docstrings.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    section: ClassVar[str]
    """Dotted name of the section, for error messages."""

    def problems(self) -> Iterator[str]:
        """Yield the contradictions between the section's settings, each a sentence that names the settings. The first
        one invalidates the section. A section that inherits rules also yields `super().problems()`."""
        return iter(())

    @model_validator(mode="after")
    def _has_no_problem(self) -> Self:
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return those of the named settings that differ from their defaults."""
        fields = type(self).model_fields
        return [name for name in names if getattr(self, name) != fields[name].get_default(call_default_factory=True)]

    def unused(self, names: Iterable[str], reason: str) -> Iterator[str]:
        """Yield a problem for each of the named settings that was set, though it has no effect. `reason` says why, and
        what to do."""
        for name in self.changed(names):
            yield f"{self.section}.{name} is {json.dumps(getattr(self, name), default=str)}, but {reason}"

    def of_other_engines(self, engine: str) -> Iterator[str]:
        """Yield a problem if a setting was changed that the section's engine lacks but another engine has."""
        place = self.section
        others = dict.fromkeys(name for other in engines_of(place) for name in ENGINES[other].settings[place])
        if changed := self.changed(name for name in others if name not in ENGINES[engine].settings[place]):
            having = list_engines(place, lambda other: changed[0] in other.settings[place])
            yield (
                f'{place}.{changed[0]} is for {place}.engine = {having}, but {place}.engine is "{engine}": leave one '
                "of them out"
            )


def own_function(setting: str) -> AfterValidator:
    """Return a validator for a setting that may name a user's function as "package.module:function" or
    "file.py:function"."""
    return AfterValidator(lambda name: name and check_own(setting, name, "function"))


def with_setting(setting: str, message: str) -> str:
    """Prefix a message with its setting's name: "run.steps = 0: ..." or "data.path: can't read ..."."""
    if not setting:
        return message
    return f"{setting}{' ' if message.startswith(CONTINUING) else ': '}{message}"
