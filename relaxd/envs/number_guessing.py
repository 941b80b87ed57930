"""Environment for a game in which the model guesses a number."""

import re
from random import Random

from relaxd.envs.environment import Environment, Reply, Sample, Step

_NUMBER = re.compile(r"(?<!\d)-?\d{1,18}(?!\d)")


class NumberGuessing(Environment):
    """Game that chooses a number, and answers each guess with "higher" or "lower". A guess is the last number of a
    message.

    The reward is 1 if the model finds the number, else 0. The metric is `guesses`, the number of guesses.
    """

    def __init__(self, low: int = 1, high: int = 100, max_guesses: int = 7) -> None:
        """Check the settings of the game. Raises ValueError if `low` is above `high`, or `max_guesses` is below 1."""
        if low > high or max_guesses < 1:
            raise ValueError(
                f"low is {low}, high {high} and max_guesses {max_guesses}: low <= high, and max_guesses >= 1"
            )
        self._low, self._high, self._max_guesses = low, high, max_guesses
        self._number = low
        self._guesses = 0

    def open(self, sample: Sample) -> str:
        """Choose the number to guess from the sample's seed. Returns the first message of the game."""
        self._number = Random(sample.seed).randint(self._low, self._high)
        return f"I think of a number from {self._low} to {self._high}. You have {self._max_guesses} guesses."

    def step(self, reply: Reply) -> Step:
        """Compare the guess in the model's message with the number."""
        self._guesses += 1
        found = _NUMBER.findall(reply.text)
        guess = int(found[-1]) if found else None
        info = {"guesses": float(self._guesses)}
        if guess == self._number:
            return Step(None, 1.0, True, info)
        if self._guesses >= self._max_guesses:
            return Step(None, 0.0, True, info)
        if guess is None:
            return Step("Guess a number.", info=info)
        return Step(f"My number is {'higher' if guess < self._number else 'lower'} than {guess}.", info=info)
