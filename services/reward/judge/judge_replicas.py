"""The judge in the run's own replicas, which the coordinator knows, and calls of it for rewards."""

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import Protocol

import grpc

from relaxd import telemetry
from relaxd.config import JudgeConfig
from relaxd.rewards.judge.asking import JudgeError
from relaxd.roles import JUDGE
from relaxd.rpc.client import channel
from relaxd.rpc.errors import explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1.coordinator_pb2 import ListReplicasRequest, RegisteredReplica
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.judge_pb2_grpc import JudgeStub
from relaxd.v1.replica_pb2 import (
    REPLICA_STATE_IDLE,
    REPLICA_STATE_READY,
    REPLICA_STATE_STARTING,
    REPLICA_STATE_UNSPECIFIED,
)
from services.reward.remote.foreign_calls import MismatchError, UnreachableError
from services.reward.remote.patience import PatientCaller

LOOK_SECONDS = 10.0
"""Interval of looking for new replicas at the coordinator while questions are answered."""
AVOIDED_SECONDS = 5.0
"""A replica that did not answer isn't asked for this long; by then the coordinator knows if it has ended."""
LIST_SECONDS = 5.0
PAGE = 1000

_TO_COME = (REPLICA_STATE_UNSPECIFIED, REPLICA_STATE_IDLE, REPLICA_STATE_STARTING)
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_log = logging.getLogger(__name__)


@dataclass
class _Replica:
    """A replica that can be asked."""

    channel: grpc.aio.Channel
    stub: JudgeStub
    open: int = 0
    """Questions without a reply."""
    avoided_until: float = 0.0
    ready: bool = True
    """By the last look."""


class JudgeReplicas:
    """Asks the replica with the fewest open questions of this process. Lives in one event loop."""

    def __init__(self, coordinator: CoordinatorStub, settings: ServiceSettings, run_id: str) -> None:
        self.who, self.on = "the judge", JUDGE
        self._coordinator = coordinator
        self._settings = settings
        self._run_id = run_id
        self._replicas: dict[str, _Replica] = {}
        """Replicas that are ready or still have a question, by id."""
        self._came = False
        """True once a replica was ready."""
        self._to_come: str | None = None
        """The replicas that are only starting, for people; None if there is another reason why none is ready."""
        self._look_at = 0.0
        self._looking = asyncio.Lock()

    async def probe(self) -> None:
        await self._look()
        self._choose()

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        if time.monotonic() >= self._look_at:
            await self._look()
        replica_id = self._choose()
        replica = self._replicas[replica_id]
        replica.open += 1
        try:
            return await replica.stub.Ask(question, timeout=seconds)
        except grpc.aio.AioRpcError as error:
            if error.code() in _AWAY:
                replica.avoided_until = time.monotonic() + AVOIDED_SECONDS
                self._look_at = 0.0
                raise UnreachableError(f"{replica_id}: {explain(error)}") from error
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise JudgeError(f"the judge {replica_id} gave no reply within {seconds:g} s") from error
            raise JudgeError(f"the judge {replica_id}: {explain(error)}") from error
        finally:
            replica.open -= 1

    async def close(self) -> None:
        replicas, self._replicas = self._replicas, {}
        for replica in replicas.values():
            await replica.channel.close(None)

    def _choose(self) -> str:
        """Return the id of the replica to ask. Raises UnreachableError."""
        now = time.monotonic()
        ready = [name for name, replica in self._replicas.items() if replica.ready]
        able = [name for name in ready if self._replicas[name].avoided_until <= now]
        if not able:
            if not ready and self._to_come is not None:
                raise UnreachableError(self._to_come, starting=True)
            known = f" but those that did not answer a moment ago ({', '.join(ready[:3])})" if ready else ""
            raise UnreachableError(f"no judge replica is ready{known}")
        fewest = min(self._replicas[name].open for name in able)
        return random.choice([name for name in able if self._replicas[name].open == fewest])

    async def _look(self) -> None:
        """Ask the coordinator which replicas there are. While it is away, those that were there stay."""
        async with self._looking:
            if time.monotonic() < self._look_at:
                return  # somebody else has looked
            try:
                listed = await self._list()
            except grpc.aio.AioRpcError as error:
                _log.warning("asking the same judge replicas, because the coordinator is away: %s", explain(error))
                self._look_at = time.monotonic() + LIST_SECONDS
                return
            found = {one.registration.replica_id: one for one in listed if self._is_able(one)}
            self._to_come = self._describe_start(listed)
            self._came |= bool(found)
            self._look_at = time.monotonic() + LOOK_SECONDS * bool(found)
            for name in found.keys() - self._replicas.keys():
                own = self._settings
                address = found[name].registration.address
                to = channel(address, token=own.token, tls=own.tls, stack=own.stack)
                self._replicas[name] = _Replica(to, JudgeStub(to))
            for name, replica in list(self._replicas.items()):
                replica.ready = name in found
                if not replica.ready and not replica.open:  # closing its channel would end its calls
                    del self._replicas[name]
                    await replica.channel.close(None)

    async def _list(self) -> list[RegisteredReplica]:
        found: list[RegisteredReplica] = []
        token = ""
        while True:
            request = ListReplicasRequest(role=JUDGE, page_size=PAGE, page_token=token)
            answer = await self._coordinator.ListReplicas(request, timeout=LIST_SECONDS)
            found += answer.replicas
            if not (token := answer.next_page_token):
                return found

    def _describe_start(self, listed: list[RegisteredReplica]) -> str | None:
        """Name the replicas that are starting; None if there are none, though there were."""
        starting = [one for one in listed if one.status.state in _TO_COME]
        if not starting and (self._came or listed):
            return None
        names = [f"{one.registration.replica_id} {one.status.detail}".rstrip() for one in starting[:3]]
        return ", ".join(names) or "no replica of it is registered yet"

    def _is_able(self, replica: RegisteredReplica) -> bool:
        status = replica.status
        return status.state == REPLICA_STATE_READY and status.run_id == self._run_id


class Judges(Protocol):
    """Location of the judge."""

    who: str
    """The judge, for people."""
    on: str
    """Its address, or the role of its replicas."""

    async def probe(self) -> None:
        """Ask whether it is there. Raises UnreachableError, MismatchError."""

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        """Ask it within `seconds`. Raises JudgeError, UnreachableError."""

    async def close(self) -> None:
        """Close its connections."""


class JudgeClient:
    """Asks the run's judge. Lives in one event loop."""

    def __init__(self, config: JudgeConfig, judges: Judges) -> None:
        self._config = config
        self._judges = judges
        self._caller = PatientCaller(
            judges.who,
            judges.on,
            judges.probe,
            max_in_flight=config.max_in_flight,
            timeout_seconds=config.timeout_seconds,
            outage_seconds=config.outage_seconds,
            per_second=config.questions_per_second,
            turn="a question's turn (roles.judge.questions_per_second)",
        )
        self._replies = 0

    @property
    def pieces(self) -> int:
        """A counter of replies, probes and looks, which shows that the replica isn't stuck."""
        return self._replies + self._caller.pieces

    @property
    def detail(self) -> str:
        """Call that takes long, in one sentence; empty if none does."""
        return self._caller.detail

    async def start(self) -> None:
        """Begin with a judge that may be away for now. Raises MismatchError: it can't be asked."""
        await self._caller.start()

    def forgive(self) -> None:
        """Count roles.judge.outage_seconds of a judge that is away from now on."""
        self._caller.forgive()

    async def ask(self, question: AskRequest) -> AskResponse:
        """Return the judge's reply. Raises JudgeError. Cancelling this ends the call."""
        outcome = "failed"
        begun = time.monotonic()
        try:
            reply = await self._caller.call(lambda: self._judges.ask(question, self._config.timeout_seconds))
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
        self._caller.close()
        await self._judges.close()
