"""Settings of the curriculum: which prompts are given how often."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from relaxd.config.base import Section
from relaxd.importing import check_known_or_own, check_own

SAMPLERS = ("uniform", "hard", "learnable")
"""relaxd's own samplers."""


class CurriculumConfig(Section):
    """Which prompts are given how often, by how well the model has answered them so far (docs/curriculum.md)."""

    sampler: str = "uniform"
    """Frequencies of the prompts. uniform: all alike. hard: in proportion to 1 - pass rate (Kimi k1.5, arXiv
    2501.12599). learnable: in proportion to pass rate x (1 - pass rate) (arXiv 2502.12272). Prompts that were never
    tried count as much as any. Or a class of your own, "package.module:Class" or "file.py:Class"."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Arguments of a sampler of your own."""
    min_weight: float = Field(default=0.1, gt=0, le=1)
    """With hard and learnable: how often the least wanted prompt is given, as a share of the most wanted."""
    min_pass_rate: float = Field(default=0.0, ge=0, le=1)
    """Leave out prompts with a lower pass rate after `tries` tries: they are too hard. 0 leaves out none."""
    max_pass_rate: float = Field(default=1.0, ge=0, le=1)
    """Leave out prompts with a higher pass rate after `tries` tries: they are solved. 1 leaves out none."""
    tries: int = Field(default=2, ge=1)
    """Groups of a prompt that must be scored before it may be left out."""
    retest: float = Field(default=0.05, ge=0, le=1)
    """Share of the visits to prompts which are left out that take place all the same, because the model has changed
    since."""
    replay: float = Field(default=0.0, ge=0, lt=1)
    """Share of all visits that go to a hard prompt which was tried before, instead of the next prompt."""
    replay_below: float = Field(default=0.5, gt=0, le=1)
    """A prompt with at most this pass rate is hard, for replay, unless it is left out."""
    memory: int = Field(default=4, ge=1)
    """Number of groups that a pass rate is the mean of, about: of later ones each counts 1/memory."""
    min_reward: float = 0.0
    """Mean reward of a group that is a pass rate of 0; lower ones are, too."""
    max_reward: float = 1.0
    """Mean reward of a group that is a pass rate of 1; higher ones are, too."""
    exhausted: Literal["repeat", "end"] = "repeat"
    """Once fewer prompts than trainer.groups_per_step aren't left out: repeat gives all prompts again, until enough of
    them have a pass rate within the limits. end ends the run."""
    filter: str = ""
    """Your own filter of groups, "package.module:function" or "file.py:function": gets a list of the group's samples
    with their rewards, and returns whether to train on it. A group that isn't is dropped and replaced by another."""

    @property
    def is_own(self) -> bool:
        """True if the sampler is the user's."""
        return self.sampler not in SAMPLERS

    @property
    def leaves_out(self) -> bool:
        """True if prompts may be left out."""
        return self.min_pass_rate > 0 or self.max_pass_rate < 1

    @property
    def chooses(self) -> bool:
        """True if visits differ from those of the data's epochs."""
        return self.sampler != "uniform" or self.leaves_out or self.replay > 0

    @field_validator("sampler")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_known_or_own("data.curriculum.sampler", name, SAMPLERS, "relaxd has", "Your own")

    @field_validator("filter")
    @classmethod
    def _is_function(cls, name: str) -> str:
        return check_own("data.curriculum.filter", name, "function")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        wrong = ""
        if self.min_pass_rate >= self.max_pass_rate:
            wrong = (
                f"min_pass_rate is {self.min_pass_rate}: it must be less than max_pass_rate = {self.max_pass_rate}, or "
                "every prompt would be left out"
            )
        elif self.min_reward >= self.max_reward:
            wrong = f"min_reward is {self.min_reward}: it must be less than max_reward = {self.max_reward}"
        elif self.is_own and self.replay:
            wrong = f'replay is {self.replay}: a sampler of your own ("{self.sampler}") replays prompts itself: set 0'
        elif self.settings and not self.is_own:
            wrong = f'settings are for a sampler of your own, but sampler is "{self.sampler}"'
        if wrong:
            raise ValueError(f"data.curriculum.{wrong}")
        return self
