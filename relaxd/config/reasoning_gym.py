"""The source "reasoning_gym": which of reasoning-gym's procedural tasks, and how much of it."""

from typing import Any

from pydantic import Field

from relaxd.config.base import Section


class ReasoningGymConfig(Section):
    """A task of reasoning-gym (pip install 'relaxd[reasoning]'), for data.source = "reasoning_gym"."""

    task: str = ""
    """Name of the task, such as "spell_backward"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, by the names that its configuration class has, such as max_word_len = 5."""
    size: int = Field(default=2000, ge=1)
    """Prompts to train on. They are made when the run starts: most tasks make thousands a second, some only a few."""
    held_out: int = Field(default=200, ge=0)
    """Prompts to evaluate on; what is asked there is never asked in training."""
    seed: int = Field(default=0, ge=0)
    """Seeds the prompts. Apart from run.seed, so that runs with other seeds have the same held-out prompts."""
    instruction: str = ""
    """What to say in a paragraph after the question, such as "Answer with the word only."."""
