"""The reward stage of a run, and its pool of workers, which Score calls also use."""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace

from relaxd import telemetry
from relaxd.board import Column, Delivery, Drop, DropReason
from relaxd.board.worker import Process, Result
from relaxd.config import RewardConfig, RunConfig
from relaxd.evaluation.sets import sets_of
from relaxd.replica.replica_service import ReplicaContext, ServiceStatus
from relaxd.replica.stage_replica import StageReplica
from relaxd.rewards import RewardInput, RewardOutput, UnknownRewardError
from relaxd.rewards.scorers import check_names
from relaxd.roles import REWARD
from relaxd.v1.coordinator_pb2 import Assignment
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.replica_pb2 import REPLICA_WAIT_SCORE, REPLICA_WAIT_SERVICE
from relaxd.waiting import Backoff, waiting
from services.reward.cache import ScoreCache
from services.reward.judge import JudgeClient, JudgeReplicas, Judges, no_judge
from services.reward.patience import MismatchError
from services.reward.remote_scorer import RemoteScorer, RemoteTerms, of_workers
from services.reward.samples import columns_of_rewards, samples_of_columns
from services.reward.worker_enclosure import describe_enclosure, missing_of
from services.reward.worker_pool import REWARD_OF_RUN, Failure, WorkerPool, WorkerStartError

RETRY_PAUSE = Backoff(first_seconds=0.5, max_seconds=30.0)
"""Pauses before failed samples are scored again (reward.on_failure = "retry")."""
LOG = "RELAXD_LOG"
"""Environment variable with the path of this process's log, if its supervisor writes one."""
DEFAULT_WORKERS = 2
"""Number of worker processes before the first run; later reward.workers applies."""
DEFAULT_TIMEOUT_SECONDS = 10.0
"""Deadline of a sample, in seconds, before the first run; later reward.timeout_seconds applies."""

_log = logging.getLogger(__name__)


class RewardService(StageReplica):
    """Works on the stage "reward" of a run."""

    role = REWARD
    stage = "reward"

    def __init__(self, context: ReplicaContext) -> None:
        super().__init__(context)
        self.pool = WorkerPool(DEFAULT_WORKERS, secret_files=context.settings.secret_files)
        """Pool of worker processes. Each run replaces it with its own."""
        self.timeout_seconds = DEFAULT_TIMEOUT_SECONDS
        """Deadline of a sample, in seconds."""
        self.reward_of_run = ""
        """Name of the run's reward; empty without a run."""
        self._remotes: dict[str, RemoteScorer | RemoteTerms] = {}
        """Clients of rewards that use services at an address, by name of the reward."""
        self._judge: JudgeClient | None = None
        """Judge of the run, if it has one."""
        self._run_id = ""
        self._cache = ScoreCache(0)
        self._last_frames = ""
        """Frames of the last logged traceback: a traceback with the same frames isn't logged again."""
        self.sets: frozenset[str] = frozenset()
        """Names of the run's evaluation sets that have a separate reward."""

    async def start_run(self, config: RunConfig, assignment: Assignment) -> None:
        self._run_id = assignment.run_id
        await super().start_run(config, assignment)

    async def prepare(self, config: RunConfig) -> tuple[Process, int]:
        """Load the run's reward, so that a wrong name fails the start instead of every group."""
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
        """Load a reward, or connect to its service. Raises UnknownRewardError."""
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
        """Load a reward by its name, or the run's. Returns None if it can be used, else the failure.

        Raises WorkerStartError, PoolClosedError.
        """
        with self._giving_up():
            return None if reward in self._remotes else await self.pool.load(reward)

    async def score(self, reward: str, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt. `reward`: name of a reward, "" for the run's, or a result of `reward_of_set`.

        Raises WorkerStartError, PoolClosedError.
        """
        with self._giving_up():
            if reward != REWARD_OF_RUN:
                return await self._score_with(reward, samples)
            return await self._cache.score(samples, lambda unknown: self._score_with(REWARD_OF_RUN, unknown))

    @contextmanager
    def _giving_up(self) -> Iterator[None]:
        """Give this process up if the block can't start workers: only a new process may be able to."""
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
        """Return a counter of samples, replies of the judge, and probes of a service that doesn't answer."""
        return self.pool.scored + sum(client.pieces for client in self._clients)

    def status(self) -> ServiceStatus:
        """Return the status; its detail describes an outage of a service, or a slow sample."""
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

        Conversations whose environment failed get 0.
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
    """Return the service's name for an evaluation set's separate reward."""
    return f"the evaluation set {name}"  # no name of a reward: those have a colon, or are bundled


def _count(config: RewardConfig, outcome: str, samples: int) -> None:
    telemetry.record("reward.failures", samples, {"relaxd.reward": config.shown, "relaxd.outcome": outcome})


def _or_zero(outcome: RewardOutput | Failure) -> RewardOutput:
    """Return an outcome with the part `failed`, 1 or 0; a failure gets reward 0."""
    if isinstance(outcome, Failure):
        return RewardOutput(0.0, {"failed": 1.0})
    return RewardOutput(outcome.reward, {**outcome.parts, "failed": 0.0})
