"""Client of an external reward service that speaks relaxd.v1.RemoteReward."""

import json
from collections.abc import Sequence

import grpc

from relaxd.config import RewardConfig
from relaxd.rewards import RewardInput, RewardOutput
from relaxd.rewards.interface import BadRewardError, check_output, text_message
from relaxd.rpc.client import MAX_MESSAGE_BYTES
from relaxd.rpc.errors import is_too_large
from relaxd.sandbox.running_time import LOOK_SECONDS
from relaxd.v1 import remote_reward_pb2 as pb
from relaxd.v1.remote_reward_pb2_grpc import RemoteRewardStub
from services.reward.deadline import Deadline
from services.reward.patience import MismatchError, UnreachableError, authorization
from services.reward.worker_pool import Failure

PROBE_SECONDS = 5.0
"""Deadline of a probe, in seconds."""
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
"""Part of the details of UNAVAILABLE from a server that speaks another protocol."""


class GrpcClient:
    """Requests the scores of a group's answers in one call. The service gets none of relaxd's tokens."""

    calls_per_sample = False

    def __init__(self, config: RewardConfig) -> None:
        self._address, self._who = config.address, f"the reward service at {config.address}"
        self._settings_json = json.dumps(config.settings)
        self._token = tuple(authorization(config).items())
        self._channel = grpc.aio.insecure_channel(config.address, _OPTIONS)
        self._stub = RemoteRewardStub(self._channel)

    async def probe(self) -> None:
        """Ask whether the service works. Raises UnreachableError, MismatchError."""
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
        """Close the connection."""
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
