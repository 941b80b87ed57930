"""The reward service: the reward stage of a run, its pool of workers and cache of scores, and the calls of
relaxd.v1.Reward, which use them, too."""

import asyncio
import hashlib
import json
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

from relaxd import telemetry
from relaxd.board import Column, Delivery, Drop, DropReason
from relaxd.board.worker import Process, Result
from relaxd.config import RewardConfig, RunConfig
from relaxd.evaluation.sets import sets_of
from relaxd.replica.replica_service import ReplicaContext, ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.rewards import REWARDS, RewardInput, RewardOutput, UnknownRewardError, check_name, describe, is_bundled
from relaxd.rewards.scorers import check_names
from relaxd.roles import REWARD
from relaxd.rpc.errors import InvalidArgument, PermissionDenied, Unavailable, Violations
from relaxd.rpc.message_parts import words
from relaxd.v1 import content_pb2, reward_pb2, reward_pb2_grpc
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.replica_pb2 import REPLICA_WAIT_SCORE, REPLICA_WAIT_SERVICE
from relaxd.v1.sample_pb2 import FinishReason
from relaxd.waiting import Backoff, waiting
from services.reward.judge import JudgeClient, JudgeReplicas, Judges, no_judge
from services.reward.patience import MismatchError
from services.reward.remote_scorer import RemoteScorer, RemoteTerms, of_workers
from services.reward.samples import columns_of_rewards, samples_of_columns, samples_of_request
from services.reward.worker_enclosure import describe_enclosure, missing_of
from services.reward.worker_pool import (
    REWARD_OF_RUN,
    Failure,
    PoolClosedError,
    Score,
    Scored,
    WorkerPool,
    WorkerStartError,
)

RETRY_PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses, in seconds, before failed samples are scored again (reward.on_failure = "retry")."""
LOG = "RELAXD_LOG"
"""Name of the environment variable with the path of this process's log, if the supervisor writes one."""
DEFAULT_WORKERS = 2
"""Number of worker processes before the first run; later reward.workers applies."""
DEFAULT_TIMEOUT_SECONDS = 10.0
"""Deadline of a sample, in seconds, before the first run; later reward.timeout_seconds applies."""

_log = logging.getLogger(__name__)


class RewardService(StageReplica):
    """The reward replica: scores the groups of a run in stage "reward"."""

    role = REWARD
    stage = "reward"

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self.pool = WorkerPool(DEFAULT_WORKERS, secret_files=context.settings.secret_files)
        """Pool of worker processes. Each run replaces it with a new pool."""
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        """Deadline for scoring one sample, in seconds."""
        self.reward_of_run = ""
        """Name of the run's reward; empty without a run."""
        self._remotes: dict[str, RemoteScorer | RemoteTerms] = {}
        """Clients of rewards that use services at addresses, by name of the reward."""
        self._judge: JudgeClient | None = None
        """Client of the run's judge; None if the run has no judge."""
        self._run_id = ""
        self._cache = ScoreCache(0)
        self._last_frames = ""
        """Stack frames of the last logged traceback; a traceback with the same frames isn't logged again."""
        self.sets: frozenset[str] = frozenset()
        """Names of the run's evaluation sets that have a separate reward."""

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._run_id = assignment.run_id
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        """Load the run's rewards, so that a wrong name fails the start instead of every group. Returns the function
        that scores a group, and the maximum number of groups in progress."""
        check_names(config.reward)
        self.reward_of_run = config.reward.shown
        of_sets = {one.name: one.reward for one in sets_of(config) if one.reward is not None}
        self.sets = frozenset(of_sets)
        rewards = {REWARD_OF_RUN: config.reward} | {reward_of_set(name): reward for name, reward in of_sets.items()}
        own = {name: part for name, reward in rewards.items() if (part := of_workers(reward)) is not None}
        secret_files = self._settings.secret_files
        told = self._context.user_messages.add
        pool = WorkerPool(config.reward.workers, config.reward, self._ask_judge, own, secret_files, told)
        self.pool.close()
        self.pool = pool
        self.timeout_seconds = config.reward.timeout_seconds
        self._cache = ScoreCache(config.reward.cache_samples)
        await self._close_clients()
        if config.roles.judge.is_there:
            await self._start_judge(config)
        for name, reward in rewards.items():
            await self._prepare(name, reward)
        if config.reward.cache_samples and self.pool.takes_group(REWARD_OF_RUN):
            raise UnknownRewardError(
                f"reward.cache_samples is {config.reward.cache_samples}, but {config.reward.shown} scores groups: a "
                "sample's score may depend on the others, so it must be 0"
            )
        if measures := self.pool.enclosure:
            _log.log(logging.WARNING if missing_of(measures) else logging.INFO, "%s", describe_enclosure(measures))
        loop = asyncio.get_running_loop()

        def process(delivery: Delivery, columns: dict[str, Column]) -> Future[Result]:
            return asyncio.run_coroutine_threadsafe(self._score_group(config, delivery, columns), loop)

        # Two more groups than workers: while one group's last samples run, another's keep every worker busy.
        return process, (config.reward.max_in_flight if config.reward.calls_services else config.reward.workers) + 2

    async def _prepare(self, name: str, config: RewardConfig) -> None:
        """Load a reward in a worker, or connect to its service, or both. Raises UnknownRewardError."""
        of = "" if name == REWARD_OF_RUN else f"{name}: "
        if of_workers(config) is not None and (failure := await self.pool.load(name)):
            raise UnknownRewardError(of + failure.reason)
        if not config.calls_services:
            return
        remote = self._remotes[name] = RemoteScorer(config) if config.address else RemoteTerms(config, self.pool)
        try:
            await remote.start()
        except MismatchError as error:
            raise UnknownRewardError(f"{of}{error}") from error

    async def load(self, reward: str) -> Failure | None:
        """Load a reward by its name; "" is the run's reward. Returns None if the reward can be used, otherwise the
        failure.

        Raises WorkerStartError, PoolClosedError.
        """
        with self._giving_up():
            return None if reward in self._remotes else await self.pool.load(reward)

    async def score(self, reward: str, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt. `reward`: name of a reward, "" for the run's reward, or what `reward_of_set`
        returns.

        Raises WorkerStartError, PoolClosedError.
        """
        with self._giving_up():
            if reward != REWARD_OF_RUN:
                return await self._score_with(reward, samples)
            return await self._cache.score(samples, lambda unknown: self._score_with(REWARD_OF_RUN, unknown))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """If the block raises WorkerStartError, ask for this process to be replaced: a new process may be able to start
        workers."""
        try:
            yield
        except WorkerStartError as error:
            self._context.give_up(str(error))
            raise

    async def _score_with(self, reward: str, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        if reward in self._remotes:
            return await self._remotes[reward].score(samples)
        return await self.pool.score(reward, samples, self.timeout_seconds)

    async def _start_judge(self, config: RunConfig) -> None:
        """Create the client of the run's judge. Raises UnknownRewardError if the judge can't be used."""
        judges: Judges
        if config.roles.judge.has_replicas:
            judges = JudgeReplicas(self._context.coordinator, self._settings, self._run_id)
        else:
            from services.reward.http_services import ChatCompletions  # most runs need no HTTP: 0.15 s

            judges = ChatCompletions(config.roles.judge, self._settings.judge_key)
        self._judge = JudgeClient(config.roles.judge, judges)
        try:
            await self._judge.start()
        except MismatchError as error:
            raise UnknownRewardError(str(error)) from error

    async def _ask_judge(self, question: AskRequest) -> AskResponse:
        return await (no_judge(question) if self._judge is None else self._judge.ask(question))

    async def _close_clients(self) -> None:
        clients, self._remotes, self._judge = self._clients, {}, None
        for client in clients:
            await client.close()

    @property
    def _clients(self) -> list[RemoteScorer | RemoteTerms | JudgeClient]:
        return [*self._remotes.values(), *([] if self._judge is None else [self._judge])]

    def pieces(self) -> int:
        """Return a counter of scored samples, judge replies and probes. While it grows, the replica doesn't count as
        stuck."""
        return self.pool.scored + sum(client.pieces for client in self._clients)

    def status(self) -> ServiceStatus:
        """Return the replica's status. Its detail describes a service that doesn't answer, or a sample that takes
        long."""
        status = super().status()
        for client in self._clients:
            if detail := client.detail:
                return replace(status, detail=detail, wait=REPLICA_WAIT_SERVICE)
        if (slow := self.pool.slowest()) is not None:
            detail = f"{self.reward_of_run} has been scoring {slow}"
            return replace(status, detail=detail, wait=REPLICA_WAIT_SCORE)
        return status

    async def resume_run(self) -> None:
        """Resume and reload the reward, because people repair it while the run is paused."""
        self.pool.reload()
        self._cache.clear()
        for client in self._clients:
            client.forgive()
        await super().resume_run()

    async def stop_run(self) -> None:
        self.reward_of_run, self.sets = "", frozenset()
        await super().stop_run()
        await self._close_clients()

    async def _score_group(self, config: RunConfig, delivery: Delivery, columns: dict[str, Column]) -> Result:
        samples = samples_of_columns(columns)
        try:
            outcomes = await self._score_samples(config.reward, samples)
        except WorkerStartError as error:
            raise asyncio.CancelledError from error  # the group is handed back, and the attempt doesn't count
        failures = [(number, outcome) for number, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
        if failures:
            number, failure = failures[0]
            _log.warning(
                "group %s: reward %s failed for %d of %d samples; sample %d: %s",
                delivery.group_id,
                config.reward.shown,
                len(failures),
                len(outcomes),
                number,
                failure.reason,
            )
            self._log_traceback(failure)
            _count(config.reward, "zero" if config.reward.on_failure == "zero" else "dropped", len(failures))
            if config.reward.on_failure != "zero":
                where = f"; its traceback is in {log}" if failure.traceback and (log := os.environ.get(LOG)) else ""
                return Drop(DropReason.REWARD_FAILED, detail=f"{config.reward.shown}: {failure.reason}{where}")
        if config.reward.on_failure == "zero":
            return columns_of_rewards([_or_zero(outcome) for outcome in outcomes])
        return columns_of_rewards([outcome for outcome in outcomes if isinstance(outcome, RewardOutput)])

    def _log_traceback(self, failure: Failure) -> None:
        frames = failure.traceback.rstrip().rpartition("\n")[0]  # the last line may name a value of this sample
        if frames and frames != self._last_frames:
            _log.warning("%s", failure.traceback.rstrip())
            self._last_frames = frames

    async def _score_samples(self, config: RewardConfig, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        """Score the samples of a group, and repeat failed ones if reward.on_failure says so.

        Conversations whose environment failed get reward 0.
        """
        whole = [number for number, one in enumerate(samples) if one.finish_reason != "env_failed"]
        if len(whole) < len(samples):
            outcomes: list[RewardOutput | Failure] = [RewardOutput(0.0)] * len(samples)
            scored = await self._score_samples(config, [samples[number] for number in whole]) if whole else []
            for number, outcome in zip(whole, scored, strict=True):
                outcomes[number] = outcome
            return outcomes
        outcomes = await self.score(REWARD_OF_RUN, samples)
        for failures in range(1, config.max_retries + 1 if config.on_failure == "retry" else 1):
            failed = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Failure)]
            if not failed:
                break
            _count(config, "retried", len(failed))
            with waiting(f"scoring {len(failed)} failed samples again"):
                await asyncio.sleep(RETRY_PAUSE.pause(failures))
            again = await self.score(REWARD_OF_RUN, [samples[number] for number in failed])
            for number, outcome in zip(failed, again, strict=True):
                outcomes[number] = outcome
        return outcomes


def reward_of_set(name: str) -> str:
    """Return the name under which this service keeps an evaluation set's separate reward."""
    return f"the evaluation set {name}"  # no name of a reward: those have a colon, or are bundled


def _count(config: RewardConfig, outcome: str, samples: int) -> None:
    telemetry.record("reward.failures", samples, {"relaxd.reward": config.shown, "relaxd.outcome": outcome})


def _or_zero(outcome: RewardOutput | Failure) -> RewardOutput:
    """Return an outcome with the part `failed`: 0 for a score, 1 for a failure, which gets reward 0."""
    if isinstance(outcome, Failure):
        return RewardOutput(0.0, {"failed": 1.0})
    return RewardOutput(outcome.reward, {**outcome.parts, "failed": 0.0})


class ScoreCache:
    """Cache with the scores of the most recently scored samples. Failures aren't stored."""

    def __init__(self, size: int) -> None:
        """`size`: number of scores to keep; 0 turns the cache off."""
        self._size = size
        self._scores: OrderedDict[bytes, RewardOutput] = OrderedDict()
        self.hits = 0
        """Number of samples that needed no scoring: the score was cached, or an equal sample was in the same call."""

    def clear(self) -> None:
        """Remove all scores, because the reward may have been changed."""
        self._scores = OrderedDict()  # calls in progress keep the old one

    async def score(self, samples: Sequence[RewardInput], score: Score) -> Scored:
        """Return the scores of samples of one prompt. `score` computes those that aren't cached; equal samples are
        scored once."""
        if not self._size:
            return await score(samples)
        scores = self._scores
        keys = [_key(sample) for sample in samples]
        found: dict[bytes, RewardOutput | Failure] = {}
        for key in keys:
            if key in scores:
                scores.move_to_end(key)
                found[key] = scores[key]
        unknown = {key: sample for key, sample in zip(keys, samples, strict=True) if key not in found}
        self.hits += len(samples) - len(unknown)
        if unknown:
            found |= zip(unknown, await score(list(unknown.values())), strict=True)
        for key in unknown:
            if isinstance(outcome := found[key], RewardOutput):
                scores[key] = outcome
        while len(scores) > self._size:
            scores.popitem(last=False)
        return [found[key] for key in keys]


def _key(sample: RewardInput) -> bytes:
    """Return the digest of everything that a reward gets about a sample, as the key of the cache. Messages contain
    hashes of images."""
    described = astuple(replace(sample, media={}))
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


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
    """Return the samples in a ScoreRequest. Raises InvalidArgument naming every wrong field.

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
    """Add a violation to `violations` for every invalid part of these messages."""
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
    """Return the nesting depth of lists and objects in a JSON value; 0 for a scalar."""
    levels, inside = 0, [value]
    while inside := [one for one in inside if isinstance(one, dict | list)]:
        levels += 1
        inside = [item for one in inside for item in (one.values() if isinstance(one, dict) else one)]
    return levels


def _score(outcome: RewardOutput | Failure) -> reward_pb2.Score:
    if isinstance(outcome, Failure):
        return reward_pb2.Score(error=outcome.reason, traceback=outcome.traceback)
    return reward_pb2.Score(reward=outcome.reward, parts=outcome.parts)
