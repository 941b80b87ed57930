"""The service relaxd.v1.Advantage, which computes the advantages of one group on request."""

import math
from typing import Any

import numpy as np
from pydantic import ValidationError

from relaxd.algorithms import Algorithm, Filtered, create
from relaxd.config.algorithm import ALGORITHM, OwnConfig
from relaxd.config.load_toml import explain
from relaxd.rpc.errors import InvalidArgument, Violations
from relaxd.v1 import advantage_pb2, advantage_pb2_grpc
from relaxd.v1.group_pb2 import DropReason

MAX_TOKENS = 10_000_000
"""Maximum response tokens of one Compute call: its answer, with a value for each, must fit into a message."""


class AdvantageServicer(advantage_pb2_grpc.AdvantageServicer):
    """Answers relaxd.v1.Advantage. Needs no run: a request names its algorithm."""

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
            return advantage_pb2.ComputeResponse(drop_reason=DropReason.Value(f"DROP_REASON_{result.reason.name}"))
        per_sample = np.split(result.values, np.cumsum(lengths)[:-1])
        return advantage_pb2.ComputeResponse(
            advantages=[advantage_pb2.TokenValues(values=values) for values in per_sample]
        )


def parse_compute_request(
    request: advantage_pb2.ComputeRequest,
) -> tuple[Algorithm, np.ndarray, np.ndarray]:
    """Return algorithm, rewards float64 [n] and lengths int32 [n]. Raises InvalidArgument naming every wrong field."""
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
