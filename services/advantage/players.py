"""Advantages of conversations in which each player has its own reward (agent.credit = "sequence")."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import Advantages, Algorithm, Filtered
from relaxd.algorithms.results import advantages_of
from relaxd.board import COLUMNS, PLAYER, SEQUENCE_REWARD, Column


def advantages_by_player(algorithm: Algorithm, columns: Mapping[str, Column]) -> Advantages | Filtered:
    """Return a group's advantages. Each player's sequences are compared as the samples of a group.

    So a player is compared with the same player of the other samples, who began in the same state. A player whose
    sequences the algorithm filters has advantages of 0; a group in which it filters all players is filtered.

    Raises AlgorithmError.
    """
    players, lengths = np.asarray(columns[PLAYER]), np.asarray(columns["lengths"], np.int32)
    rewards = np.asarray(columns[SEQUENCE_REWARD], np.float64)
    values = np.zeros(int(lengths.sum()), np.float32)
    filtered: Filtered | None = None
    for player in np.unique(players):
        own = players == player
        of_token = np.repeat(own, lengths)
        chosen = {name: _chosen(name, columns, own, of_token) for name in algorithm.needs.advantages}
        found = advantages_of(algorithm, rewards[own], lengths[own], chosen)
        if isinstance(found, Filtered):
            filtered = found
        else:
            values[of_token] = found.values
    if filtered is not None and not values.any():
        return filtered
    return Advantages(values)


def _chosen(name: str, columns: Mapping[str, Column], own: NDArray[np.bool_], of_token: NDArray[np.bool_]) -> Any:
    """Return a column's values for sequences; `own` [S] and `of_token` [T] choose them."""
    if name == "sample_of_sequence":
        return np.arange(np.count_nonzero(own), dtype=np.int32)
    column = columns[name]
    if COLUMNS[name].shape == "S":
        return [column[place] for place in np.flatnonzero(own)] if isinstance(column, list) else np.asarray(column)[own]
    return np.asarray(column)[of_token] if COLUMNS[name].shape == "T" else column
