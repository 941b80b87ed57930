"""The service relaxd.v1.Reward, which scores samples on request."""

import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from relaxd.rewards import REWARDS, RewardInput, RewardOutput, UnknownRewardError, check_name, describe, is_bundled
from relaxd.rpc.errors import InvalidArgument, PermissionDenied, Unavailable, Violations
from relaxd.rpc.message_parts import words
from relaxd.v1 import content_pb2, reward_pb2, reward_pb2_grpc
from relaxd.v1.sample_pb2 import FinishReason
from services.reward.samples import samples_of_request
from services.reward.service import RewardService, reward_of_set
from services.reward.worker_pool import REWARD_OF_RUN, Failure, PoolClosedError, WorkerStartError

MAX_NESTING = 100
"""Maximum depth of a prompt's metadata: workers get it as JSON, whose reader and writer recurse."""
MAX_RESPONSES = 4096
"""Maximum number of responses of one Score call, because other callers share the workers."""


class RewardServicer(reward_pb2_grpc.RewardServicer):
    """Answers relaxd.v1.Reward, with the service's workers.

    Args:
        service: the reward service.
        allowed: rewards that callers may name besides the bundled ones and the run's.
    """

    def __init__(self, service: RewardService, allowed: Collection[str]) -> None:
        self._service = service
        self._allowed = allowed

    async def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        samples = parse_score_request(request, bool(self._service.reward_of_run), self._service.sets)
        self._check_allowed(request.reward)
        reward = reward_of_set(request.evaluation_set) if request.evaluation_set else request.reward
        try:
            if not is_bundled(reward) and (failure := await self._service.load(reward)):
                raise InvalidArgument(f"reward: {failure.reason}", [("reward", failure.reason)])
            outcomes = await self._service.score(reward, samples)
        except PoolClosedError as error:
            raise Unavailable("the service is changing to another run, or ending: try again") from error
        except WorkerStartError as error:
            raise Unavailable(f"this replica can't score, and ends: {error}") from error
        return reward_pb2.ScoreResponse(scores=map(_score, outcomes))

    async def ListRewards(self, request: reward_pb2.ListRewardsRequest, context: Any) -> reward_pb2.ListRewardsResponse:
        infos = [reward_pb2.RewardInfo(name=name, description=describe(name)) for name in sorted(REWARDS)]
        return reward_pb2.ListRewardsResponse(rewards=infos)

    def _check_allowed(self, name: str) -> None:
        """Raise PermissionDenied unless callers may name this reward: loading one by name runs its code."""
        of_run = {REWARD_OF_RUN, self._service.reward_of_run}
        if is_bundled(name) or name in of_run or name in self._allowed:
            return
        raise PermissionDenied(
            f'reward "{name}" is not allowed: callers may use the bundled ones, that of the run '
            f"({self._service.reward_of_run or 'there is none now'}), and those that this service was started with "
            "(--allowed-rewards / RELAXD_ALLOWED_REWARDS)"
        )


def parse_score_request(
    request: reward_pb2.ScoreRequest, has_run: bool, sets: Collection[str] = ()
) -> list[RewardInput]:
    """Return the samples of a request. Raises InvalidArgument naming every wrong field.

    Args:
        request: the request.
        has_run: True if the service has a run. An empty reward name then means the run's reward.
        sets: names of the run's evaluation sets that have separate rewards.
    """
    violations = Violations()
    try:
        if request.reward != REWARD_OF_RUN:
            check_name(request.reward)
        elif not has_run:
            violations.add("reward", "is empty, which means the run's reward: this service has no run, so name one")
    except UnknownRewardError as error:
        violations.add("reward", str(error))
    if name := request.evaluation_set:
        violations.check(not request.reward, "evaluation_set", "is given with a reward: give one of them")
        known_sets = ", ".join(sorted(sets)) or "none"
        must = f"it must be a set of the run with a reward of its own; there are {known_sets}"
        violations.check(name in sets, "evaluation_set", f"is {name!r}: {must}")
    count = len(request.responses)
    violations.check(0 < count <= MAX_RESPONSES, "responses", f"has {count} entries: give 1 to {MAX_RESPONSES}")
    for field in ("finish_reasons", "response_tokens", "environment_outcomes"):
        given = len(getattr(request, field))
        must = "give one each, or none at all"
        violations.check(given in (0, count), field, f"has {given} entries for {count} responses: {must}")
    for number, outcome in enumerate(request.environment_outcomes):
        for name, value in (("reward", outcome.reward), *outcome.info.items()):
            finite = math.isfinite(value)
            violations.check(finite, f"environment_outcomes[{number}]", f"{name} is {value}: it must be finite")
    known = words(FinishReason)
    for number, reason in enumerate(request.finish_reasons):
        must = "it must be a finish reason's number"
        violations.check(reason in known, f"finish_reasons[{number}]", f"is {reason}: {must}")
    metadata: Any = {}
    try:
        metadata = json.loads(request.metadata_json or "{}")
    except (ValueError, RecursionError) as error:
        violations.add("metadata_json", f"is not JSON, or nested too deeply: {error}")
    violations.check(isinstance(metadata, dict), "metadata_json", "must be a JSON object")
    violations.check(
        _nesting(metadata) <= MAX_NESTING, "metadata_json", f"is nested too deeply: at most {MAX_NESTING} levels"
    )
    _check_messages(violations, "prompt", request.prompt)
    _check_messages(violations, "answer", request.answer)
    for number, response in enumerate(request.responses):
        _check_messages(violations, f"responses[{number}].messages", response.messages)
    violations.raise_if_any()
    return samples_of_request(request)


def _check_messages(violations: Violations, field: str, messages: Iterable[content_pb2.Message]) -> None:
    """Add the faults of messages to `violations`."""
    for number, message in enumerate(messages):
        for place, part in enumerate(message.content):
            name, kind = f"{field}[{number}].content[{place}]", part.WhichOneof("part")
            if kind is None:
                violations.add(name, "is empty: give text, image, audio or video")
            elif kind != "text":
                media: content_pb2.Media = getattr(part, kind)
                violations.check(media.uri, f"{name}.{kind}.uri", "is empty: media are given by reference")
                length = len(media.sha256)
                violations.check(length in (0, 32), f"{name}.{kind}.sha256", f"has {length} bytes: give 32, or none")


def _nesting(value: Any) -> int:
    """Return the depth to which lists and objects are nested."""
    levels, inside = 0, [value]
    while inside := [one for one in inside if isinstance(one, dict | list)]:
        levels += 1
        inside = [item for one in inside for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def _score(outcome: RewardOutput | Failure) -> reward_pb2.Score:
    if isinstance(outcome, Failure):
        return reward_pb2.Score(error=outcome.reason, traceback=outcome.traceback)
    return reward_pb2.Score(reward=outcome.reward, parts=outcome.parts)
