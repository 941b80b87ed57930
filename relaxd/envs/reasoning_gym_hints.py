"""Tasks of reasoning-gym with several tries: after a wrong answer the model gets a hint, and may answer again."""

from collections.abc import Mapping
from typing import Any, Literal

from relaxd.data.sources.reasoning_gym_source import KEY
from relaxd.envs.environment import Environment, Reply, Sample, Step
from relaxd.rewards.hub.reasoning_gym import reasoning_gym
from relaxd.rewards.interface import RewardInput

HINTS = ("none", "score", "beginning")


class ReasoningGymHints(Environment):
    """Scores answers like the reward reasoning_gym, for prompts of data.source = "reasoning_gym".

    The reward is the score of the last answer, times `discount` for each answer before it. Numbers: `tries`, and
    `first_score`, the score of the first answer.
    """

    def __init__(
        self, tries: int = 3, hint: Literal["none", "score", "beginning"] = "score", discount: float = 1.0
    ) -> None:
        """Check the settings.

        Args:
            tries: maximum number of answers.
            hint: content of the message after a wrong answer. none: only that it is wrong. score: its score. beginning:
                the beginning of the reference answer, longer after each try.
            discount: factor of the reward for each answer before the last one.

        Raises ValueError: a setting is wrong.
        """
        if tries < 1:
            raise ValueError(f"tries is {tries}: it must be at least 1")
        if hint not in HINTS:
            raise ValueError(f'hint is {hint!r}: it must be "none", "score" or "beginning"')
        if not 0 <= discount <= 1:
            raise ValueError(f"discount is {discount}: it must be from 0 to 1")
        self._most, self._hint, self._discount = tries, hint, discount
        self._tries = 0
        self._first_score = 0.0
        self._answer = ""
        self._metadata: Mapping[str, Any] = {}

    def open(self, sample: Sample) -> None:
        """Begin a conversation. Raises ValueError if the prompt isn't from reasoning-gym."""
        if KEY not in sample.metadata:
            raise ValueError(f'the prompt has no "{KEY}" in its metadata: data.source must be "reasoning_gym"')
        self._answer, self._metadata = sample.answer, sample.metadata

    def step(self, reply: Reply) -> Step:
        """Score an answer. Raises ValueError as the reward does."""
        score = reasoning_gym(RewardInput("", reply.text, self._answer, self._metadata))["reward"]
        if not self._tries:
            self._first_score = score
        self._tries += 1
        info = {"tries": float(self._tries), "first_score": self._first_score}
        if score >= 1.0 or self._tries >= self._most:
            return Step(None, score * self._discount ** (self._tries - 1), True, info)
        return Step(f"{self._told(score)} Answer again.", info=info)

    def _told(self, score: float) -> str:
        match self._hint:
            case "score":
                return f"That is not right: it scores {score:.3g} of 1."
            case "beginning":
                shown = self._answer[: max(1, len(self._answer) * self._tries // (self._most + 1))]
                return f"That is not right. The answer begins with {shown!r}."
        return "That is not right."
