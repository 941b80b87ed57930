"""Adapter for games of TextArena, which are chosen by name, for a single player or against a user's function."""

from collections.abc import Callable
from typing import Any

from relaxd.envs.environment import Environment, Reply, Sample, Step
from relaxd.importing import import_own
from relaxd.seeds import SEEDS, seeding

try:
    import textarena
except ImportError as error:
    raise ImportError(f"{error}: install textarena for the interpreter that agent.python names") from error


class TextArenaGame(Environment):
    """A game of TextArena, textarena.make(env_id). The text of each message of the model is a move.

    The reward is the game's final reward for the model. The metrics are `moves`, and `invalid_move`, which is 1 if the
    model made an invalid move.
    """

    def __init__(self, env_id: str, *, players: int = 1, player: int = 0, opponent: str = "", **settings: Any) -> None:
        """Check the settings and create the game.

        Args:
            env_id: name of the game, such as "GuessTheNumber-v0".
            players: number of players.
            player: the model's player number, from 0.
            opponent: function that moves for the other players, "file.py:function": takes a player's observation as
                text, and returns the move.
            settings: arguments of textarena.make.

        Raises ValueError if there is no such game or player, or other players have no opponent function.
        """
        if not 0 <= player < players:
            raise ValueError(f"player is {player}: it must be 0 to {players - 1}, as players is {players}")
        if (players > 1) != bool(opponent):
            raise ValueError(
                f'players is {players} and opponent "{opponent}": name a function for more than one player'
            )
        self._game = textarena.make(env_id=env_id, **settings)
        self._players, self._player = players, player
        self._opponent: Callable[[str], str] | None = import_own(opponent) if opponent else None
        self._seen = ""
        self._moves = 0

    def open(self, sample: Sample) -> str | None:
        """Start a game with the group's seed. Returns the first observation, which the model sees after the prompt."""
        with seeding:
            self._game.reset(num_players=self._players, seed=sample.seed % SEEDS)
        return self._observation(done=False)[0]

    def step(self, reply: Reply) -> Step:
        """Make the model's move, then the other players' moves until it is the model's turn."""
        self._moves += 1
        done, _ = self._game.step(action=reply.text)
        observation, done = self._observation(done)
        if not done:
            return Step(observation, info={"moves": self._moves})
        rewards, info = self._game.close()
        invalid = float(bool(info[self._player].get("invalid_move")))
        return Step(None, rewards[self._player], True, {"moves": self._moves, "invalid_move": invalid})

    def _observation(self, done: bool) -> tuple[str, bool]:
        """Make the other players' moves until it is the model's turn. Returns the text since the model's last turn,
        and whether the game is over."""
        while not done:
            player, text = self._game.get_observation()
            if player == self._player or self._opponent is None:
                new = text.removeprefix(self._seen)  # TextArena shows the whole game at each turn
                self._seen = text
                return new.lstrip("\n"), False
            done, _ = self._game.step(action=self._opponent(text))
        return "", True
