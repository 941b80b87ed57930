"""Credit assignment within conversations: advantages by player or by message (agent.credit)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from relaxd.algorithms import Advantages, Algorithm, Filtered
from relaxd.algorithms.results import advantages_of
from relaxd.board import COLUMNS, MESSAGE_RETURNS, PLAYER, SEQUENCE_REWARD, Column


@dataclass(frozen=True)
class _Part:
    """A part of a conversation with a separate reward: a sequence, or its tokens from one model message to the next."""

    sequence: int
    """Index of its sequence."""
    tokens: int
    """Number of its tokens."""
    reward: float
    compared_with: tuple[int, int]
    """Player and number of the message. Parts with equal values are compared with each other."""


def advantages_by_part(algorithm: Algorithm, columns: Mapping[str, Column]) -> Advantages | Filtered:
    """Return a group's advantages. The algorithm treats each set of comparable parts like the samples of a group.

    A player's sequences are compared with those of the same player in the other samples, which began in the same state;
    a model message is compared with the messages of the same number. Parts that the algorithm filters, or that have no
    counterpart, get advantages of 0. A group is filtered if all of its parts are.

    Raises AlgorithmError.
    """
    parts = _parts(columns)
    sequences, lengths = np.array([one.sequence for one in parts]), np.array([one.tokens for one in parts], np.int32)
    rewards = np.array([one.reward for one in parts], np.float64)
    values = np.zeros(int(lengths.sum()), np.float32)
    filtered: Filtered | None = None
    has_several_samples = bool(np.asarray(columns["sample_of_sequence"])[-1])
    for compared in sorted({one.compared_with for one in parts}):
        own = np.array([one.compared_with == compared for one in parts])
        if has_several_samples and np.count_nonzero(own) == 1:
            continue
        of_token = np.repeat(own, lengths)
        chosen = {name: _chosen(name, columns, sequences[own], of_token) for name in algorithm.needs.advantages}
        found = advantages_of(algorithm, rewards[own], lengths[own], chosen)
        if isinstance(found, Filtered):
            filtered = found
        else:
            values[of_token] = found.values
    if filtered is not None and not values.any():
        return filtered
    return Advantages(values)


def _parts(columns: Mapping[str, Column]) -> list[_Part]:
    """Return the parts of a group, in the order of their tokens."""
    players = np.asarray(columns[PLAYER]).tolist()
    if SEQUENCE_REWARD in columns:
        lengths, rewards = np.asarray(columns["lengths"]).tolist(), np.asarray(columns[SEQUENCE_REWARD]).tolist()
        found = zip(lengths, rewards, players, strict=True)
        return [_Part(index, length, reward, (player, 0)) for index, (length, reward, player) in enumerate(found)]
    messages: Any = columns[MESSAGE_RETURNS]
    return [
        _Part(index, length, following, (player, number))
        for index, (of_sequence, player) in enumerate(zip(messages, players, strict=True))
        for number, (length, following) in enumerate(of_sequence)
    ]


def _chosen(name: str, columns: Mapping[str, Column], sequences: NDArray[Any], of_token: NDArray[np.bool_]) -> Any:
    """Return a column's values for the compared parts: by part from `sequences`, or by token from the mask
    `of_token`."""
    if name == "sample_of_sequence":
        return np.arange(len(sequences), dtype=np.int32)
    column = columns[name]
    if COLUMNS[name].shape == "S":
        return [column[index] for index in sequences] if isinstance(column, list) else np.asarray(column)[sequences]
    return np.asarray(column)[of_token] if COLUMNS[name].shape == "T" else column
