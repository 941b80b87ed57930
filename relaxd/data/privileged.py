"""Prompts with what only the teacher sees.

With the trained model itself as the teacher this is on-policy self-distillation (Zhao et al., "Self-Distilled
Reasoner").
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from relaxd.config import RunConfig
from relaxd.data.errors import DataError
from relaxd.data.examples import Example
from relaxd.data.tokenizer import PromptTokenizer

SECTION = "roles.teacher"


@dataclass(frozen=True)
class PrivilegedPrompts:
    """Makes the teacher's prompts."""

    key: str
    """roles.teacher.privileged_key."""
    template: str
    """roles.teacher.privileged_template."""
    limit: int
    """Maximum number of tokens of a prompt."""

    def encode(self, tokenizer: PromptTokenizer, examples: Sequence[Example]) -> list[np.ndarray]:
        """Tokenise the teacher's prompts: an int32 array each. Raises DataError: a row has nothing to tell."""
        return tokenizer.encode([self.example(example) for example in examples])

    def example(self, example: Example) -> Example:
        """Return a prompt whose question has what only the teacher sees. Raises DataError: there is nothing."""
        parts = {"{prompt}": example.text, "{privileged}": self._found(example)}
        # At once: what is put in may itself look like a placeholder.
        text = re.sub(r"\{prompt\}|\{privileged\}", lambda match: parts[match[0]], self.template)
        if isinstance(example.prompt, str):
            return replace(example, prompt=text)
        messages = list(example.prompt)
        messages[example.asked] = {**messages[example.asked], "content": text}
        return replace(example, prompt=messages)

    def too_long(self, place: str, tokens: int) -> DataError:
        """Return the error of a prompt that is too long for the teacher."""
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
    """Return the maker of the teacher's prompts, if a run's teacher has its own."""
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
