"""The reward service: the Score call and the reward stage, over one pool of workers."""

import asyncio
import json
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from relaxd.board import Column, Delivery, Drop
from relaxd.board.worker import Process, Result
from relaxd.config import RunConfig
from relaxd.rewards import REWARDS, RewardInput, RewardOutput, UnknownRewardError, check_name, describe
from relaxd.rpc.errors import InvalidArgument, PermissionDenied, Unavailable, Violations
from relaxd.rpc.settings import ServiceSettings
from relaxd.rpc.stage_replica import StageReplica
from relaxd.v1 import replica_pb2, reward_pb2, reward_pb2_grpc
from services.reward.pool import Failure, PoolClosedError, WorkerPool

DEFAULT_WORKERS = 2
"""Processes of a replica that has no run yet; then it is reward.workers."""
DEFAULT_TIMEOUT_SECONDS = 10.0
"""Deadline of a sample while there is no run; then it is reward.timeout_seconds."""
DEEPEST = 100
"""Levels of a prompt's metadata: the workers get it as JSON, whose reader and writer recurse."""
MOST_RESPONSES = 4096
"""Most responses of one Score call: others wait for the same workers."""

_log = logging.getLogger(__name__)


class RewardService(StageReplica, reward_pb2_grpc.RewardServicer):
    """relaxd.v1.Reward, and the stage "reward" of a run."""

    role = replica_pb2.ROLE_REWARD
    stage = "reward"

    def __init__(self, settings: ServiceSettings) -> None:
        super().__init__(settings)
        self._pool = WorkerPool(DEFAULT_WORKERS)
        self._timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        self._reward_of_run = ""
        """The reward of the run that this replica is prepared for."""

    # --- the calls

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        """See the proto."""
        samples = parse_score_request(request)
        self._check_allowed(request.reward)
        try:
            if request.reward not in REWARDS and (failure := await self._pool.load(request.reward)):
                raise InvalidArgument(f"reward: {failure.reason}", [("reward", failure.reason)])
            outcomes = await self._pool.score(request.reward, samples, self._timeout_seconds)
        except PoolClosedError as error:
            raise Unavailable("the service is changing to another run, or ending: try again") from error
        return reward_pb2.ScoreResponse(scores=map(_score, outcomes))

    def _check_allowed(self, name: str) -> None:
        """Raise PermissionDenied: calling a function by its name runs code, which not every caller may choose."""
        if name in REWARDS or name == self._reward_of_run or name in self._settings.allowed_rewards:
            return
        raise PermissionDenied(
            f'reward "{name}" may not be asked for: allowed are the bundled ones, that of the run '
            f"({self._reward_of_run or 'there is none now'}), and those that this service was started with "
            "(--allowed-rewards / RELAXD_ALLOWED_REWARDS)"
        )

    async def ListRewards(self, request: reward_pb2.ListRewardsRequest, context: Any) -> reward_pb2.ListRewardsResponse:
        """See the proto."""
        infos = [reward_pb2.RewardInfo(name=name, description=describe(name)) for name in sorted(REWARDS)]
        return reward_pb2.ListRewardsResponse(rewards=infos)

    # --- the stage

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        """Load the run's reward once, so that a name that doesn't work fails the start and not every group."""
        check_name(config.reward.name)
        self._reward_of_run = config.reward.name
        pool = WorkerPool(config.reward.workers, config.reward.environment)
        self._pool.close()
        self._pool = pool
        self._timeout_seconds = config.reward.timeout_seconds
        if failure := await self._pool.load(config.reward.name):
            raise UnknownRewardError(failure.reason)
        loop = asyncio.get_running_loop()

        def process(delivery: Delivery, columns: dict[str, Column]) -> Future[Result]:
            return asyncio.run_coroutine_threadsafe(self._score_group(config, delivery, columns), loop)

        # Two groups more than needed to keep every worker busy: one ends while the other's samples fill the gaps.
        return process, config.reward.workers + 2

    def pieces(self) -> int:
        """See StageReplica: samples."""
        return self._pool.scored

    async def stop_run(self) -> None:
        """See ReplicaService."""
        self._reward_of_run = ""
        await super().stop_run()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()

    async def _score_group(self, config: RunConfig, delivery: Delivery, columns: dict[str, Column]) -> Result:
        outcomes = await self._pool.score(config.reward.name, samples_of(columns), config.reward.timeout_seconds)
        failures = [(number, outcome) for number, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
        if failures:
            number, failure = failures[0]
            _log.warning(
                "group %s: reward %s failed for %d of %d samples; sample %d: %s",
                delivery.group_id,
                config.reward.name,
                len(failures),
                len(outcomes),
                number,
                failure.reason,
            )
            return Drop("reward_failed")
        return reward_columns([outcome for outcome in outcomes if isinstance(outcome, RewardOutput)])


def samples_of(columns: dict[str, Column]) -> list[RewardInput]:
    """The samples of a group, from its columns prompt, text and finish.

    Raises ValueError when they are not what the stage before and the coordinator write.
    """
    prompt, texts, finish = columns["prompt"], columns["text"], columns["finish"]
    if not isinstance(prompt, dict) or not isinstance(texts, list) or not isinstance(finish, list):
        raise ValueError("prompt must be an object, text and finish lists")
    return [
        RewardInput(
            prompt=prompt["text"],
            response=text,
            answer=prompt.get("answer", ""),
            metadata=prompt.get("metadata", {}),
            finish_reason=reason,
        )
        for text, reason in zip(texts, finish, strict=True)
    ]


def reward_columns(outputs: Sequence[RewardOutput]) -> dict[str, Column]:
    """The columns that the stage writes: reward float64 [n], reward_parts {name: [n floats]}.

    A part that some samples of the group lack is left out: a number made up for them would falsify its mean.
    """
    names = [name for name in outputs[0].parts if all(name in output.parts for output in outputs)]
    return {
        "reward": np.array([output.reward for output in outputs], dtype=np.float64),
        "reward_parts": {name: [output.parts[name] for output in outputs] for name in names},
    }


def parse_score_request(request: reward_pb2.ScoreRequest) -> list[RewardInput]:
    """The samples of a request. Raises InvalidArgument that names every field that is wrong."""
    violations = Violations()
    try:
        check_name(request.reward)
    except UnknownRewardError as error:
        violations.add("reward", str(error))
    count = len(request.responses)
    violations.check(0 < count <= MOST_RESPONSES, "responses", f"has {count} entries: give 1 to {MOST_RESPONSES}")
    reasons = list(request.finish_reasons) or [""] * len(request.responses)
    violations.check(
        len(reasons) == len(request.responses),
        "finish_reasons",
        f"has {len(reasons)} entries for {len(request.responses)} responses: give one each, or none at all",
    )
    for number, reason in enumerate(reasons):
        violations.check(
            reason in ("", "stop", "length", "abort"),
            f"finish_reasons[{number}]",
            f'is "{reason}": it must be stop, length or abort',
        )
    metadata: Any = {}
    try:
        metadata = json.loads(request.metadata_json or "{}")
    except (ValueError, RecursionError) as error:
        violations.add("metadata_json", f"is not JSON, or nested too deeply: {error}")
    violations.check(isinstance(metadata, dict), "metadata_json", "must be a JSON object")
    violations.check(_nesting(metadata) <= DEEPEST, "metadata_json", f"is nested too deeply: at most {DEEPEST} levels")
    violations.raise_if_any()
    return [
        RewardInput(request.prompt, response, request.answer, metadata, reason)
        for response, reason in zip(request.responses, reasons, strict=True)
    ]


def _nesting(value: Any) -> int:
    """How many lists and objects are inside each other."""
    levels, inside = 0, [value]
    while inside := [one for one in inside if isinstance(one, dict | list)]:
        levels += 1
        inside = [item for one in inside for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def _score(outcome: RewardOutput | Failure) -> reward_pb2.Score:
    if isinstance(outcome, Failure):
        return reward_pb2.Score(error=outcome.reason)
    return reward_pb2.Score(reward=outcome.reward, parts=outcome.parts)
