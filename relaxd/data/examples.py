"""What a data set consists of, before it is templated and tokenised."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]
"""A chat message: {"role": "user" | "assistant" | "system" | ..., "content": text}."""


@dataclass(frozen=True)
class Example:
    """One prompt with what the reward needs to judge an answer."""

    prompt: str | list[Message]
    """The user's words, or a whole conversation."""
    answer: str = ""
    """The reference answer."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Every other field of the line, as the reward gets it."""
    place: str = ""
    """Where it comes from, for error messages: "train.jsonl line 3"."""

    @property
    def messages(self) -> list[Message]:
        """The prompt as a conversation."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    @property
    def text(self) -> str:
        """The prompt as it is shown to people: what was said last."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]
