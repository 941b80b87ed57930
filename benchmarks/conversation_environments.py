"""Environments for benchmarks of conversations."""

import asyncio
import string
from random import Random

from relaxd.envs.environment import Environment, Reply, Sample, Step

LETTERS = string.ascii_lowercase + " "


class Talk(Environment):
    """Answers each message but the last one with a text of random letters, after some time."""

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
        if self._turn == self._turns:
            return Step(done=True)
        await asyncio.sleep(self._seconds)
        return Step("".join(self._random.choices(LETTERS, k=self._letters)))


class Search(Talk):
    """The same as a tool, which the model calls."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "search",
                "description": "Searches a corpus.",
                "parameters": {
                    "type": "object",
                    "properties": {"query": {"type": "string", "description": "words to look for"}},
                    "required": ["query"],
                },
            },
        },
    )
