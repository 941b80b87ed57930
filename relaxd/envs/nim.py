"""Environment for Nim, a game for two players: the model plays against itself or a fixed opponent."""

import re
from random import Random
from typing import Literal

from relaxd.envs.environment import Environment, Reply, Sample, Step

_NUMBER = re.compile(r"(?<!\d)\d{1,9}(?!\d)")
_OPPONENTS = ("self", "random", "best")


class Nim(Environment):
    """The game Nim. Players take stones from a heap in turn; the player who takes the last stone wins.

    A move is the last number of a message. The reward is 1 for the winner and 0 for the loser; a missing or forbidden
    move loses. The field `stones` of the prompt's metadata sets the initial number of stones; without it, the seed
    does. The metrics are `moves` of both players, and `bad_moves`.
    """

    def __init__(
        self, max_stones: int = 12, max_take: int = 3, opponent: Literal["self", "random", "best"] = "self"
    ) -> None:
        """Check the settings of the game.

        Args:
            max_stones: maximum number of stones at the beginning.
            max_take: maximum number of stones of a move.
            opponent: "self": the model plays both players, and agent.players must be 2. "random" takes a random allowed
                number; "best" makes winning moves if there are any, and random moves otherwise.

        Raises ValueError if there is no such opponent, or a number is below 1.
        """
        if opponent not in _OPPONENTS:
            raise ValueError(f"opponent is {opponent!r}: it must be one of {', '.join(_OPPONENTS)}")
        if max_stones < 1 or max_take < 1:
            raise ValueError(f"max_stones is {max_stones} and max_take {max_take}: they must be >= 1")
        self._max_stones, self._max_take, self._opponent = max_stones, max_take, opponent
        self._stones = max_stones
        self._player = self._moves = 0
        self._random = Random(0)

    def open(self, sample: Sample) -> str:
        """Set up the heap of stones. Raises ValueError if the prompt's `stones` is no allowed number of stones."""
        self._random = Random(sample.seed)
        stones = sample.metadata.get("stones", self._random.randint(1, self._max_stones))
        if type(stones) is not int or not 1 <= stones <= self._max_stones:
            raise ValueError(f"stones is {stones!r}: it must be 1 to {self._max_stones} (max_stones)")
        self._stones = stones
        return self._told()

    def step(self, reply: Reply) -> Step:
        """Make the move in the model's message, then the opponent's move, unless the model plays both."""
        found = _NUMBER.findall(reply.text)
        take = int(found[-1]) if found else 0
        self._moves += 1
        if not 1 <= take <= min(self._max_take, self._stones):
            return self._end(wins=False, bad=True)
        self._stones -= take
        if not self._stones:
            return self._end(wins=True)
        if self._opponent == "self":
            self._player = 1 - self._player
            return Step(self._told(), player=self._player)
        self._moves += 1
        self._stones -= self._opponents_move()
        return Step(self._told()) if self._stones else self._end(wins=False)

    def _end(self, *, wins: bool, bad: bool = False) -> Step:
        info = {"moves": float(self._moves), "bad_moves": float(bad)}
        others = {1 - self._player: float(not wins)} if self._opponent == "self" else {}
        return Step(None, float(wins), True, info, rewards=others)

    def _opponents_move(self) -> int:
        best = self._stones % (self._max_take + 1)
        if self._opponent == "best" and best:
            return best
        return self._random.randint(1, min(self._max_take, self._stones))

    def _told(self) -> str:
        return f"{self._stones} stones. Take 1 to {min(self._max_take, self._stones)}."
