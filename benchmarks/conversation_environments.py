"""Environments for benchmarks of conversations."""

import asyncio
import string
from random import Random

from relaxd.envs.environment import Environment, Reply, Sample, Step

LETTERS = string.ascii_lowercase + " "


class Talk(Environment):
    """Answers each message with a text of random letters, after some time, until the conversation's last turn."""

    def __init__(self, turns: int, letters: int, seconds: float = 0.0) -> None:
        """Of a conversation: `turns` messages of the model, `letters` of an answer, `seconds` until it."""
        self._turns, self._letters, self._seconds = turns, letters, seconds
        self._turn = 0
        self._random = Random()

    def open(self, sample: Sample) -> None:
        """Begin with the prompt alone."""
        self._random.seed(sample.seed)

    async def step(self, reply: Reply) -> Step:
        """Answer a message."""
        self._turn += 1
        await asyncio.sleep(self._seconds)
        return Step("".join(self._random.choices(LETTERS, k=self._letters)), done=self._turn >= self._turns)
