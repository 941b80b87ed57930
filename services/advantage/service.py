"""The advantage service: the stage "advantage" of runs, and the calls of relaxd.v1.Advantage, which need no run."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from relaxd.algorithms import Advantages, Algorithm, AlgorithmError, Filtered, create, sample_lengths
from relaxd.algorithms.algorithm_trial import create_tried
from relaxd.algorithms.results import advantages_of
from relaxd.board import COLUMNS, MESSAGE_RETURNS, PLAYER, SEQUENCE_REWARD, Column, Delivery, Drop, DropReason
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.config.algorithm import ALGORITHM, OwnConfig
from relaxd.config.load_toml import explain
from relaxd.data.curriculum.own_filter import FilterError, GroupFilter
from relaxd.replica.stage_replica import StageReplica
from relaxd.roles import ADVANTAGE
from relaxd.rpc.errors import InvalidArgument, Violations
from relaxd.v1 import advantage_pb2, advantage_pb2_grpc, group_pb2

CONCURRENCY = 8
"""Maximum number of groups that a replica works on at once.

Each takes microseconds, and several are committed in one round trip.
"""


def column_problem(columns: Mapping[str, Column], names: Iterable[str], tokens: int) -> str:
    """Describe the first fault of the token columns among `names`, which other services wrote; "" if there is none.

    Args:
        columns: the group's columns.
        names: names of the columns to check.
        tokens: number of tokens of the group's sequences.
    """
    of_tokens = [name for name in names if COLUMNS[name].shape == "T"]
    for name in of_tokens:
        if (size := np.asarray(columns[name]).size) != tokens:
            return f"{name}, which stage {COLUMNS[name].writer} writes, has {size} values for {tokens} tokens"
    trained = np.asarray(columns["loss_mask"]) != 0 if "loss_mask" in of_tokens else np.zeros(tokens, np.bool_)
    for name in of_tokens:
        if not np.isfinite(np.asarray(columns[name])[trained]).all():
            return f"{name}, which stage {COLUMNS[name].writer} writes, is NaN or infinite at a trained token"
    return ""


class AdvantageService(StageReplica):
    """Computes the advantages of groups in the stage "advantage" of a run."""

    role = ADVANTAGE
    stage = "advantage"

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        algorithm = create_tried(config.algorithm, with_loss=False)
        own = config.data.curriculum.filter
        group_filter = GroupFilter(own) if own else None

        def process(delivery: Delivery, columns: dict[str, Column]) -> Result:
            rewards = np.asarray(columns["reward"])
            lengths = sample_lengths(
                np.asarray(columns["lengths"]), np.asarray(columns["sample_of_sequence"]), rewards.size
            )
            if problem := column_problem(columns, algorithm.needs.advantages, int(lengths.sum())):
                return Drop(DropReason.MALFORMED, detail=problem)
            if group_filter is not None:
                try:
                    if not group_filter.keeps(columns):
                        return Drop(DropReason.FILTERED, filtered=True)
                except FilterError as error:
                    return Drop(DropReason.FILTER_FAILED, detail=str(error))
            try:
                if PLAYER in columns:
                    result = advantages_by_part(algorithm, columns)
                else:
                    result = advantages_of(algorithm, rewards, lengths, columns)
            except AlgorithmError as error:
                return Drop(DropReason.ALGORITHM_FAILED, detail=str(error))
            if isinstance(result, Filtered):
                return Drop(result.reason, filtered=True)
            return {"advantages": result.values}

        return process, CONCURRENCY


@dataclass(frozen=True)
class _Part:
    """A part of a conversation with a separate reward: a sequence, or a sequence's tokens from one model message to
    the next."""

    sequence: int
    """Index of the sequence that contains the part."""
    tokens: int
    """Number of tokens of the part."""
    reward: float
    compared_with: tuple[int, int]
    """Player, and number of the model message. Parts with equal values are compared with each other."""


def advantages_by_part(algorithm: Algorithm, columns: Mapping[str, Column]) -> Advantages | Filtered:
    """Return a group's advantages. The algorithm treats each set of comparable parts like the samples of a group.

    A player's sequences are compared with the same player's sequences in the other samples, which began in the same
    state. A model message is compared with the messages of the same number. Parts that the algorithm filters, or that
    have no counterpart, get advantages of 0. A group is filtered if all of its parts are.

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
    """Return the parts of a group's conversations, in the order of their tokens."""
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
    """Return a column's values for the compared parts. `sequences` has the index of each part's sequence; the mask
    `of_token` is True for the parts' tokens."""
    if name == "sample_of_sequence":
        return np.arange(len(sequences), dtype=np.int32)
    column = columns[name]
    if COLUMNS[name].shape == "S":
        return [column[index] for index in sequences] if isinstance(column, list) else np.asarray(column)[sequences]
    return np.asarray(column)[of_token] if COLUMNS[name].shape == "T" else column


MAX_TOKENS = 10_000_000
"""Maximum number of response tokens of a Compute call.

The answer, with a value for each token, must fit into a message.
"""


class AdvantageServicer(advantage_pb2_grpc.AdvantageServicer):
    """Serves the calls of relaxd.v1.Advantage. They need no run: a request contains its algorithm."""

    async def Compute(self, request: advantage_pb2.ComputeRequest, context: Any) -> advantage_pb2.ComputeResponse:
        algorithm, rewards, lengths = parse_compute_request(request)
        if algorithm.needs.advantages:
            needs = ", ".join(algorithm.needs.advantages)
            raise InvalidArgument(f"algorithm_json: the algorithm needs columns that this call doesn't have: {needs}")
        try:
            result = algorithm.advantages(rewards, lengths)
        except ValueError as error:
            raise InvalidArgument(f"rewards: {error}", [("rewards", str(error))]) from error
        if isinstance(result, Filtered):
            return advantage_pb2.ComputeResponse(
                drop_reason=group_pb2.DropReason.Value(f"DROP_REASON_{result.reason.name}")
            )
        per_sample = np.split(result.values, np.cumsum(lengths)[:-1])
        return advantage_pb2.ComputeResponse(
            advantages=[advantage_pb2.TokenValues(values=values) for values in per_sample]
        )


def parse_compute_request(
    request: advantage_pb2.ComputeRequest,
) -> tuple[Algorithm, np.ndarray, np.ndarray]:
    """Return a request's algorithm, rewards (float64 [n]) and lengths (int32 [n]).

    Raises InvalidArgument naming every wrong field.
    """
    violations = Violations()
    algorithm: Algorithm | None = None
    try:
        config = ALGORITHM.validate_json(request.algorithm_json or "null", strict=True)
        if isinstance(config, OwnConfig):
            violations.add("algorithm_json", "names a class of its own: a call can only use the algorithms of relaxd")
        else:
            algorithm = create(config)
    except ValidationError as error:
        for problem in explain(error, ("algorithm",)):
            violations.add("algorithm_json", str(problem))
    violations.check(request.rewards, "rewards", "is empty: give one for each sample of the group")
    for number, reward in enumerate(request.rewards):
        violations.check(math.isfinite(reward), f"rewards[{number}]", f"is {reward}: it must be finite")
    violations.check(
        len(request.lengths) == len(request.rewards),
        "lengths",
        f"has {len(request.lengths)} entries for {len(request.rewards)} rewards: give one each",
    )
    for number, length in enumerate(request.lengths):
        violations.check(length >= 0, f"lengths[{number}]", f"is {length}: it must not be negative")
    total = sum(length for length in request.lengths if length > 0)
    violations.check(total <= MAX_TOKENS, "lengths", f"add up to {total}: at most {MAX_TOKENS} in one call")
    violations.raise_if_any()
    assert algorithm is not None
    return algorithm, np.array(request.rewards, dtype=np.float64), np.array(request.lengths, dtype=np.int32)
