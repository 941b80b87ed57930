"""Stand-in of a rehearsal for a run's environment, program or function: it takes time, and answers with words."""

import asyncio
import math
import random

from relaxd.envs.environment import Environment, Reply, Step


class StandInEnvironment(Environment):
    """A conversation with a drawn number of turns, each of which takes a drawn time. Both are log-normal."""

    def __init__(self, turns: int, seconds: float, spread: float, words: int, word: str = " a") -> None:
        """State the conversation.

        Args:
            turns: median number of the model's messages.
            seconds: median seconds for an answer.
            spread: standard deviation of the logarithm of both.
            words: words of an answer.
            word: what each of them is.
        """
        self._random = random.Random()
        self._left = max(1, round(turns * self._factor(spread)))
        self._seconds, self._spread, self._observation = seconds, spread, words * word

    async def step(self, reply: Reply) -> Step:
        """Answer a message after a while."""
        await asyncio.sleep(self._seconds * self._factor(self._spread))
        self._left -= 1
        return Step(self._observation, done=self._left == 0)

    def _factor(self, spread: float) -> float:
        return math.exp(spread * self._random.gauss(0.0, 1.0))
