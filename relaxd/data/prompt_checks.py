"""Checks of prompts before a run, including the teacher's prompts with privileged text.

Prompts that are too long are left out here (data.overlong = "skip"), others elsewhere: repeats in
relaxd/data/duplicates.py, solved and too hard prompts in relaxd/data/curriculum/prompt_record.py.

Training with privileged text and the trained model itself as the teacher is on-policy self-distillation (Zhao et al.,
"Self-Distilled Reasoner").
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.examples import Example
from relaxd.data.sources.prompt_columns import Examples
from relaxd.data.sources.run_sources import Source, ToolsColumn
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.models import DataError

SECTION = "roles.teacher"


@dataclass(frozen=True)
class PrivilegedPrompts:
    """Builds the teacher's prompts, which include text that only the teacher sees (privileged text)."""

    key: str
    """Name of the field with the privileged text (roles.teacher.privileged_key)."""
    template: str
    """Template of the teacher's question (roles.teacher.privileged_template)."""
    limit: int
    """Maximum length of a teacher's prompt, in tokens."""

    def encode(self, tokenizer: PromptTokenizer, examples: Sequence[Example]) -> list[np.ndarray]:
        """Return the token ids of the teacher's prompts, an int32 array for each. Raises DataError if a row lacks the
        privileged text."""
        return tokenizer.encode([self.example(example) for example in examples])

    def example(self, example: Example) -> Example:
        """Return the prompt with the privileged text in its question. Raises DataError if the row has no such text."""
        parts = {"{prompt}": example.text, "{privileged}": self._found(example)}
        # In one pass: an inserted text may itself look like a placeholder.
        text = re.sub(r"\{prompt\}|\{privileged\}", lambda match: parts[match[0]], self.template)
        if isinstance(example.prompt, str):
            return replace(example, prompt=text)
        messages = list(example.prompt)
        messages[example.asked] = {**messages[example.asked], "content": text}
        return replace(example, prompt=messages)

    def too_long(self, place: str, tokens: int) -> DataError:
        """Return the error for a teacher's prompt that is too long."""
        return DataError(
            f"{SECTION}.max_prompt_tokens",
            f"= {self.limit}, but {place} has {tokens} tokens with what only the teacher sees: raise it, or set "
            'data.overlong = "skip"',
        )

    def _found(self, example: Example) -> str:
        value: Any = {"answer": example.answer, **example.metadata}
        for part in [self.key] if self.key in value else self.key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, list):
            value = "\n".join(map(str, value))
        if value is None or isinstance(value, dict) or not str(value).strip():
            names = ", ".join(["answer", *example.metadata])
            raise DataError(
                f"{SECTION}.privileged_key",
                f'= "{self.key}", but {example.place or "a prompt"} has no text or number under that name (found: '
                f"{names}): the teacher would know no more than the student",
            )
        return str(value).strip()


def privileged_prompts(config: RunConfig) -> PrivilegedPrompts | None:
    """Return the builder of the teacher's prompts; None if the run has no teacher with its own prompts."""
    if not config.has_privileged_teacher:
        return None
    teacher = config.roles.teacher
    return PrivilegedPrompts(teacher.privileged_key, teacher.privileged_template, config.teacher_prompt_tokens)


def check_teachers(config: RunConfig, examples: Iterable[Example]) -> None:
    """Raise DataError if a prompt's source has no teacher, in a run that has teachers for some sources."""
    if not config.roles.teacher.models or "teacher" not in config.frozen_roles():
        return
    for example in examples:
        source = example.metadata.get("data_source")
        if not config.roles.teacher.model_of(source):
            raise DataError(f"{SECTION}.models", config.roles.teacher.without(source, example.place or "a prompt"))


CHECK_BATCH = 1024
CHECKED = 20_000
"""Maximum number of prompts of a source to check before a run. The others are checked when they are visited."""
FIRST_LOOK = 1000
"""Number of prompts of a source that `relaxd run` checks before it starts services. The coordinator then checks
CHECKED."""
MAX_PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class Limit:
    """Length limit of prompts, and treatment of longer prompts, for prompts that weren't checked before the run."""

    tokens: int
    """Maximum length of a prompt, in tokens (data.max_prompt_tokens)."""
    skip: bool
    """True if longer prompts are left out (data.overlong = "skip"); False if they are errors."""
    field: str
    """Name of the setting that gives the prompts, for error messages."""

    def too_long(self, place: str, tokens: int) -> DataError:
        """Return the error for a prompt that is longer than the limit."""
        return DataError(
            self.field,
            f"{place} has {tokens} tokens, more than data.max_prompt_tokens = {self.tokens}: raise it, or set "
            'data.overlong = "skip"',
        )

    def all_too_long(self) -> DataError:
        """Return the error for a source whose prompts are all too long."""
        return DataError(self.field, f"every prompt is longer than data.max_prompt_tokens = {self.tokens}")


@dataclass(frozen=True)
class Checked:
    """Prompts of a source that may be published, and results of their checks."""

    examples: Sequence[Example]
    skipped: int
    """Number of prompts that were left out as too long."""
    limit: Limit | None
    """Length limit for later checks; None if all prompts were checked."""
    has_tools: bool = False
    """True if any of the checked prompts has tools."""


def check_source(
    source: Source,
    tokenizer: PromptTokenizer,
    config: RunConfig,
    teacher: PrivilegedPrompts | None = None,
    most: int | None = None,
) -> Checked:
    """Check the prompts of a source: all of them, or if there are more than CHECKED, an evenly spread sample.

    Args:
        source: the source whose prompts are checked.
        tokenizer: the model's tokenizer.
        config: the run's configuration.
        teacher: builder of the teacher's prompts, if they differ from the model's.
        most: maximum number of prompts to check, below CHECKED. Then it is no error if all checked prompts are too
            long, unless the source has no other prompts.

    Raises DataError if rows are wrong, or prompts are longer than data.max_prompt_tokens and data.overlong forbids it.
    """
    count = len(source.examples)
    limit = Limit(config.data.max_prompt_tokens, config.data.overlong == "skip", source.field)
    places = evenly_spread(count, most or CHECKED)
    examples = read_some(source, places)
    kept = []
    for start in range(0, len(examples), CHECK_BATCH):
        batch = examples[start : start + CHECK_BATCH]
        longer = tokenizer.longer(batch, limit.tokens)
        for index, example in enumerate(batch):
            if tokens := longer.get(index):
                if not limit.skip:
                    raise limit.too_long(example.place, tokens)
            elif teacher is not None and (teachers := tokenizer.longer([teacher.example(example)], teacher.limit)):
                if not limit.skip:
                    raise teacher.too_long(example.place, teachers[0])
            else:
                kept.append(example)
    if examples and not kept and (most is None or len(places) == count):
        raise limit.all_too_long()
    has_tools = any(example.tools for example in examples)
    if len(places) < count:
        return Checked(source.examples, 0, limit, has_tools)
    return Checked(kept, count - len(kept), None, has_tools)


def check_tools(checked: Iterable[tuple[Source, Checked]]) -> None:
    """Raise DataError if a setting names a column of tools, but no checked prompt has tools in this column."""
    sources: dict[ToolsColumn, list[Source]] = {}
    found: set[ToolsColumn] = set()
    for source, one in checked:
        sources.setdefault(source.tools, []).append(source)
        if one.has_tools:
            found.add(source.tools)
    for tools, those in sources.items():
        if tools.key and tools not in found:
            names = [one.examples.nearest(tools.key) for one in those if isinstance(one.examples, Examples)]
            hint = next((f'; did you mean "{name}"?' for name in names if name not in (None, tools.key)), "")
            raise DataError(
                tools.setting, f'= "{tools.key}": no prompt that was looked at has tools in such a column{hint}'
            )


def evenly_spread(count: int, most: int) -> range:
    """Return at most `most` of the positions 0 to `count` - 1, evenly spread."""
    return range(0, count, max(1, -(-count // most)))


def read_some(source: Source, places: range) -> list[Example]:
    """Return the prompts of a source at some places. Raises DataError that quotes the first wrong rows."""
    examples, problems = [], []
    for place in places:
        try:
            examples.append(source.examples[place])
        except ValueError as error:
            problems.append(str(error))
    if problems:
        if len(problems) == len(places) > 1:
            raise DataError(source.field, f"all {len(places)} rows that were read are wrong; the first: {problems[0]}")
        shown = "; ".join(problems[:MAX_PROBLEMS_SHOWN])
        more = f"; and {len(problems) - MAX_PROBLEMS_SHOWN} more" if len(problems) > MAX_PROBLEMS_SHOWN else ""
        raise DataError(source.field, f"{len(problems)} of {len(places)} rows are wrong: {shown}{more}")
    return examples
