"""Settings of evaluations."""

from typing import Self

from pydantic import Field, model_validator

from relaxd.config.base import Section


class EvalConfig(Section):
    """Greedy evaluation on held-out prompts."""

    prompts: int = Field(default=0, ge=0)
    """Number of held-out prompts, evaluated before the first and after the last step; 0 turns evaluation off."""
    interval: int = Field(default=0, ge=0)
    """Also evaluate every this many steps, during training, with the weights that the engines have and receive
    meanwhile; 0 turns it off."""
    max_new_tokens: int = Field(default=0, ge=0)
    """Maximum length of an answer, in tokens; 0 means rollout.max_new_tokens."""
    stall_seconds: float = Field(default=300.0, gt=0)
    """Move a prompt to another engine if its engine generates nothing for this long; abandon the evaluation if there is
    no engine for as long. A whole answer may take any time."""

    @model_validator(mode="after")
    def _interval_has_prompts(self) -> Self:
        if self.interval and not self.prompts:
            raise ValueError(
                f"eval.interval is {self.interval}, but eval.prompts is 0, which turns evaluation off: set "
                "eval.prompts, or remove eval.interval"
            )
        return self
