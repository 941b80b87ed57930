"""The judge in the run's own replicas, listed by the coordinator, and rewards' calls of it."""

import time
from typing import Protocol

import grpc

from relaxd import telemetry
from relaxd.config import JudgeConfig
from relaxd.replica.peer_replicas import NoReplicaError, Peer, PeerReplicas
from relaxd.rewards.judge.asking import JudgeError
from relaxd.roles import JUDGE
from relaxd.rpc.errors import explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.judge_pb2_grpc import JudgeStub
from services.reward.remote.foreign_calls import MismatchError, UnreachableError
from services.reward.remote.patience import PatientCaller

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class JudgeReplicas:
    """Sends each question to the replica with the fewest open ones from this process. Lives in one event loop."""

    def __init__(self, coordinator: CoordinatorStub, settings: ServiceSettings, run_id: str) -> None:
        self.who, self.on = "the judge", JUDGE
        self._replicas = PeerReplicas(JUDGE, JudgeStub, coordinator, settings, run_id)

    async def probe(self) -> None:
        await self._choose()

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        replica = await self._choose()
        try:
            with replica.called() as stub:
                return await stub.Ask(question, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                self._replicas.avoid(replica)
                raise UnreachableError(f"{replica.replica_id}: {explain(error)}") from error
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise JudgeError(f"the judge {replica.replica_id} gave no reply within {seconds:g} s") from error
            raise JudgeError(f"the judge {replica.replica_id}: {explain(error)}") from error

    async def close(self) -> None:
        await self._replicas.close()

    async def _choose(self) -> Peer[JudgeStub]:
        try:
            return await self._replicas.choose()
        except NoReplicaError as error:
            raise UnreachableError(str(error), starting=error.starting) from error


class Judges(Protocol):
    """Location of the judge."""

    who: str
    """The judge, for people."""
    on: str
    """Address of the judge, or the role of its replicas."""

    async def probe(self) -> None:
        """Check that the judge is reachable. Raises UnreachableError, MismatchError."""

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        """Ask the judge within `seconds`. Raises JudgeError, UnreachableError."""

    async def close(self) -> None:
        """Close its connections."""


class JudgeClient(PatientCaller):
    """Asks the run's judge. Lives in one event loop."""

    def __init__(self, config: JudgeConfig, judges: Judges) -> None:
        super().__init__(
            judges.who,
            judges.on,
            judges.probe,
            max_in_flight=config.max_in_flight,
            timeout_seconds=config.timeout_seconds,
            outage_seconds=config.outage_seconds,
            per_second=config.questions_per_second,
            turn="a question's turn (roles.judge.questions_per_second)",
        )
        self._config = config
        self._judges = judges
        self._replies = 0

    @property
    def pieces(self) -> int:
        """A counter of replies, probes and checks, which shows that the replica isn't stuck."""
        return self._replies + super().pieces

    async def ask(self, question: AskRequest) -> AskResponse:
        """Return the judge's reply. Raises JudgeError. Cancelling this ends the call."""
        outcome = "failed"
        begun = time.monotonic()
        try:
            reply = await self.call(lambda: self._judges.ask(question, self._config.timeout_seconds))
            outcome = "answered"
            return reply
        except (UnreachableError, MismatchError) as error:
            raise JudgeError(str(error)) from error
        finally:
            self._replies += 1
            telemetry.record("judge.replies", 1, {"relaxd.outcome": outcome})
            telemetry.record("judge.seconds", time.monotonic() - begun)

    async def close(self) -> None:
        """End its calls."""
        self.end_probing()
        await self._judges.close()
