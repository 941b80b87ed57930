"""Examples of a data set, before templating and tokenising."""

from dataclasses import dataclass, field, replace
from typing import Any, Self

from relaxd.media.placeholders import MediaItem, shown_text

Message = dict[str, Any]
"""A chat message: {"role": "user" | "assistant" | "system" | ..., "content": text}, perhaps with further fields, such
as "tool_calls", with which the content may be None. Content with media is a list of parts, {"type": "text", "text":
text}, {"type": "image"} or {"type": "video"}."""


@dataclass(frozen=True)
class Example:
    """A prompt of the data with the reference answer and metadata for its reward."""

    prompt: str | list[Message]
    """Text of a user's message, or a list of chat messages."""
    answer: str = ""
    """Reference answer of the prompt; "" if the data has none."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata for the reward: further fields of the prompt's row in the data."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters of the example's source that differ from the run's, by name, as JSON values."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the tools that the chat template gets."""
    place: str = ""
    """Origin of the prompt, for error messages, such as "train.jsonl line 3"."""
    media: tuple[MediaItem, ...] = ()
    """Media of the prompt, in the order of the placeholders in its text."""

    def with_system_prompt(self, text: str) -> Self:
        """Return the example with a system message of this text. Unchanged if it has a system message, or the text is
        empty."""
        if not text or self.messages[0]["role"] == "system":
            return self
        return replace(self, prompt=[{"role": "system", "content": text}, *self.messages])

    @property
    def messages(self) -> list[Message]:
        """Prompt as a list of chat messages."""
        return [{"role": "user", "content": self.prompt}] if isinstance(self.prompt, str) else self.prompt

    @property
    def asked(self) -> int:
        """Index of the message to be answered: the last that isn't the assistant's. A final assistant message begins
        the answer."""
        others = (index for index, message in enumerate(self.messages) if message["role"] != "assistant")
        return max(others, default=len(self.messages) - 1)

    @property
    def text(self) -> str:
        """Text of the prompt for display and for rewards: its last message that isn't the assistant's."""
        return shown_text(self.messages[self.asked]["content"])
