"""Settings of the data source "reasoning_gym"."""

from typing import Any

from pydantic import Field

from relaxd.config.base import Section


class ReasoningGymConfig(Section):
    """A task of reasoning-gym (pip install 'relaxd[reasoning]'), for data.source = "reasoning_gym"."""

    task: str = ""
    """Name of the task, such as "spell_backward"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings, named as in its configuration class, such as max_word_len = 5."""
    size: int = Field(default=2000, ge=1)
    """Training prompts. They are generated when the run starts; most tasks generate thousands a second, some a few."""
    held_out: int = Field(default=200, ge=0)
    """Held-out prompts for evaluation. None of them is trained on."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts. Separate from run.seed, so that runs with different seeds share held-out prompts."""
    instruction: str = ""
    """Text added as a paragraph after the question, such as "Answer with the word only."."""
