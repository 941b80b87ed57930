"""Scores samples with a service at reward.address, alone or as one of several terms. Has the client of services that
speak relaxd.v1.RemoteReward."""

import asyncio
import json
from collections.abc import Sequence
from typing import Protocol

import grpc

from relaxd.config import RewardConfig
from relaxd.config.reward import RewardTerm
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.interface import BadRewardError, check_output, text_message
from relaxd.rewards.scorers import parts_of_term, total
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.errors import is_too_large
from relaxd.sandbox.running_time import LOOK_SECONDS
from relaxd.v1 import remote_reward_pb2 as pb
from relaxd.v1.remote_reward_pb2_grpc import RemoteRewardStub
from services.reward.deadline import Deadline
from services.reward.patience import MismatchError, PatientCaller, UnreachableError, authorization
from services.reward.worker_pool import REWARD_OF_RUN, Failure, WorkerPool


class Client(Protocol):
    """Client of one reward service at an address."""

    calls_per_sample: bool
    """True if `score` takes a single sample; False if it takes several samples of one prompt."""

    async def probe(self) -> None:
        """Check that the service works. Raises UnreachableError or MismatchError if it doesn't."""

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score samples of one prompt within `seconds`. Raises UnreachableError, MismatchError."""

    async def close(self) -> None:
        """Close the connections to the service."""


def _client(config: RewardConfig) -> Client:
    if "://" not in config.address:
        return GrpcClient(config)
    from services.reward.http_services import HttpReward  # most runs need no HTTP: 0.15 s

    return HttpReward(config)


class RemoteScorer(PatientCaller):
    """Scores samples with a reward service: limits concurrent calls, repeats calls that don't reach the service, and
    waits while it is down."""

    def __init__(self, config: RewardConfig) -> None:
        self._client = _client(config)
        super().__init__(
            f"the reward service at {config.address}",
            config.address,
            self._client.probe,
            max_in_flight=config.max_in_flight,
            timeout_seconds=config.timeout_seconds,
            outage_seconds=config.outage_seconds,
        )
        self._scored = 0

    @property
    def pieces(self) -> int:
        """Counter of samples, probes and checks. While it grows, the replica doesn't count as stuck."""
        return self._scored + super().pieces

    async def score(self, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt, and return the outcomes in the samples' order. Cancelling this coroutine cancels
        its calls."""
        asked = [[sample] for sample in samples] if self._client.calls_per_sample else [list(samples)]
        tasks = [asyncio.create_task(self._score(some)) for some in asked]
        try:
            outcomes = [outcome for some in await asyncio.gather(*tasks) for outcome in some]
        finally:
            for task in tasks:
                task.cancel()
        self._scored += len(samples)
        return outcomes

    async def close(self) -> None:
        """Stop probing, and close the connections to the service."""
        self.end_probing()
        await self._client.close()

    async def _score(self, samples: list[RewardInput]) -> list[RewardOutput | Failure]:
        try:
            return await self.call(lambda: self._client.score(samples, self._timeout_seconds))
        except (UnreachableError, MismatchError) as error:
            return [Failure(str(error))] * len(samples)


def of_workers(config: RewardConfig) -> RewardConfig | None:
    """Return the part of a reward's configuration that workers score, without terms at addresses; None if no part
    remains."""
    if config.address or not config.calls_services:
        return None if config.address else config
    own = tuple(term.model_copy(update={"only_if": ""}) for term in config.terms if not term.address)
    return config.model_copy(update={"terms": own}) if own else None


class RemoteTerms:
    """Scores a reward with several terms: calls the services of terms at addresses, and concurrently the worker pool
    for the others."""

    def __init__(self, config: RewardConfig, pool: WorkerPool) -> None:
        """`pool`: worker pool for the reward `of_workers(config)`. Raises MissingVariableError."""
        self._terms = config.terms
        self._pool = pool
        self._timeout_seconds = config.timeout_seconds
        self._remote = {term.shown: RemoteScorer(_alone(config, term)) for term in config.terms if term.address}
        self._uses_pool = len(self._remote) < len(config.terms)

    @property
    def pieces(self) -> int:
        return sum(remote.pieces for remote in self._remote.values())

    @property
    def detail(self) -> str:
        return next((remote.detail for remote in self._remote.values() if remote.detail), "")

    async def probe(self) -> None:
        """Check that every service works. Raises UnreachableError or MismatchError if one doesn't."""
        for remote in self._remote.values():
            await remote.probe()

    async def start(self) -> None:
        """Start the clients of all services. Raises MismatchError."""
        for remote in self._remote.values():
            await remote.start()

    def forgive(self) -> None:
        for remote in self._remote.values():
            remote.forgive()

    async def close(self) -> None:
        """Close the clients of all services."""
        for remote in self._remote.values():
            await remote.close()

    async def score(self, samples: Sequence[RewardInput]) -> list[RewardOutput | Failure]:
        """Score samples of one prompt; a sample fails if any term can't score it. Raises PoolClosedError."""
        tasks = {label: asyncio.create_task(remote.score(samples)) for label, remote in self._remote.items()}
        if self._uses_pool:
            tasks[REWARD_OF_RUN] = asyncio.create_task(self._pool.score(REWARD_OF_RUN, samples, self._timeout_seconds))
        try:
            found = dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
        finally:
            for task in tasks.values():
                task.cancel()
        return [self._sum({label: outcomes[n] for label, outcomes in found.items()}) for n in range(len(samples))]

    def _sum(self, outcomes: dict[str, RewardOutput | Failure]) -> RewardOutput | Failure:
        parts: dict[str, float] = {}
        for outcome in outcomes.values():
            if isinstance(outcome, Failure):
                return outcome
        if isinstance(local := outcomes.get(REWARD_OF_RUN), RewardOutput):
            parts |= local.parts
        for term in self._terms:
            if isinstance(remote := outcomes.get(term.shown), RewardOutput):
                parts |= parts_of_term(term, remote)
        return RewardOutput(total(self._terms, parts), parts)


def _alone(config: RewardConfig, term: RewardTerm) -> RewardConfig:
    """Return the configuration of a reward that consists of one term at an address."""
    own = {name: getattr(term, name) for name in ("address", "address_token", "settings", "key")}
    limits = {name: getattr(config, name) for name in ("timeout_seconds", "max_in_flight", "outage_seconds")}
    return RewardConfig(**own, **limits)


PROBE_SECONDS = 5.0
"""Deadline of a probe of a reward service, in seconds."""
VERSION = "is it made from another version of protos/relaxd/v1/remote_reward.proto?"
_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
    # No keep-alive pings: by default, servers of other languages end connections with frequent ones.
]
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_NO_GRPC = "Failed parsing HTTP/2"
"""Text in the details of status UNAVAILABLE if the server speaks another protocol than gRPC."""


class GrpcClient:
    """Scores a group's samples with one call of a relaxd.v1.RemoteReward service. The service gets none of relaxd's
    tokens."""

    calls_per_sample = False

    def __init__(self, config: RewardConfig) -> None:
        self._address, self._who = config.address, f"the reward service at {config.address}"
        self._settings_json = json.dumps(config.settings)
        self._token = tuple(authorization(config).items())
        self._channel = grpc.aio.insecure_channel(config.address, _OPTIONS)
        self._stub = RemoteRewardStub(self._channel)

    async def probe(self) -> None:
        """Check that the service works. Raises UnreachableError or MismatchError if it doesn't."""
        try:
            await self._stub.ScoreAnswers(pb.ScoreAnswersRequest(), timeout=PROBE_SECONDS, metadata=self._token)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise self._mismatch("it has no call relaxd.v1.RemoteReward/ScoreAnswers") from error
            if _NO_GRPC in (error.details() or ""):
                what = (
                    f'it doesn\'t speak gRPC; if it speaks HTTP, write reward.address = "http://{self._address}/PATH"'
                )
                raise MismatchError(f"{self._who}: {what}") from error
            if error.code() in (*_AGAIN, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise UnreachableError(_describe(error)) from error
            what = f"a request without answers, which it must answer without scores, failed: {_describe(error)}"
            raise MismatchError(f"{self._who}: {what}") from error

    async def score(self, samples: Sequence[RewardInput], seconds: float) -> list[RewardOutput | Failure]:
        """Score samples of one prompt. Raises UnreachableError, MismatchError."""
        request = self._request(samples)
        clock = Deadline(2 * seconds)  # gRPC's own deadline passes earlier, unless this process is very busy
        late = f"scoring {len(samples)} answers took longer than {seconds:g} s"
        try:
            async with clock:
                answer = await self._stub.ScoreAnswers(request, timeout=seconds, metadata=self._token)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.UNIMPLEMENTED:
                raise self._mismatch("it has no call relaxd.v1.RemoteReward/ScoreAnswers") from error
            if error.code() in _AGAIN and not is_too_large(error):
                raise UnreachableError(_describe(error)) from error
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and clock.seconds < seconds - LOOK_SECONDS:
                raise UnreachableError("this process stood still during the call") from error
            if is_too_large(error):
                what = (
                    f"the request with {len(samples)} answers has {request.ByteSize()} bytes; a message was above a "
                    f"limit, so raise the service's limit for what it receives: {_describe(error)}"
                )
            elif error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                what = late
            else:
                what = _describe(error)
            return [Failure(f"{self._who}: {what}")] * len(samples)
        except TimeoutError:
            return [Failure(f"{self._who}: {late}")] * len(samples)
        if len(answer.scores) != len(samples):
            raise self._mismatch(f"it returned {len(answer.scores)} scores for {len(samples)} answers")
        return [self._outcome(score) for score in answer.scores]

    async def close(self) -> None:
        """Close the connection to the service."""
        await self._channel.close(None)

    def _request(self, samples: Sequence[RewardInput]) -> pb.ScoreAnswersRequest:
        first = samples[0]
        return pb.ScoreAnswersRequest(
            prompt=first.prompt,
            reference=first.answer,
            metadata_json=json.dumps(first.metadata),
            settings_json=self._settings_json,
            prompt_messages_json=json.dumps(first.prompt_messages or [text_message("user", first.prompt)]),
            answers=[
                pb.Answer(
                    text=sample.response,
                    finish_reason=sample.finish_reason,
                    tokens=sample.tokens,
                    messages_json=json.dumps(sample.response_messages) if sample.response_messages else "",
                    environment_reward=sample.environment_reward,
                    environment_info=sample.environment_info,
                )
                for sample in samples
            ],
        )

    def _outcome(self, score: pb.AnswerScore) -> RewardOutput | Failure:
        if score.error:
            return Failure(f"{self._who}: {score.error}")
        if not score.HasField("reward"):
            raise self._mismatch("it returned a score with neither reward nor error")
        try:
            return check_output({"reward": score.reward, "parts": dict(sorted(score.parts.items()))})
        except BadRewardError as error:
            return Failure(f"{self._who}: {error}")

    def _mismatch(self, what: str) -> MismatchError:
        return MismatchError(f"{self._who}: {what}: {VERSION}")


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details() or 'without a reason'}"
