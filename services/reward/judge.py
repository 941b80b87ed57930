"""Access to the judge for rewards: the judge's replicas, the client that asks it, and the questions of workers."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from relaxd import telemetry
from relaxd.config import JudgeConfig
from relaxd.process.child_channel import Requests
from relaxd.replica.peer_replicas import NoReplicaError, Peer, PeerReplicas
from relaxd.rewards.judge import JudgeError, NoJudgeError
from relaxd.roles import JUDGE
from relaxd.rpc.errors import RpcError, explain
from relaxd.rpc.service_settings import ServiceSettings
from relaxd.v1 import reward_worker_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.judge_pb2_grpc import JudgeStub
from relaxd.v1.reward_worker_pb2_grpc import RewardWorkerStub
from services.reward.deadline import Deadline
from services.reward.patience import MismatchError, PatientCaller, UnreachableError

_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


class JudgeReplicas:
    """Sends each question to the judge replica with the fewest open questions from this process. Lives in one event
    loop."""

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
    """Connection to the judge: to its replicas, or to a server at an address."""

    who: str
    """Name of the judge in messages for people."""
    on: str
    """Address of the judge's server, or the role name if the judge runs as replicas."""

    async def probe(self) -> None:
        """Check that the judge is reachable. Raises UnreachableError, MismatchError."""

    async def ask(self, question: AskRequest, seconds: float) -> AskResponse:
        """Ask the judge within `seconds`. Raises JudgeError, UnreachableError."""

    async def close(self) -> None:
        """Close the connections to the judge."""


class JudgeClient(PatientCaller):
    """Asks the run's judge; repeats and holds back questions while the judge doesn't answer. Lives in one event
    loop."""

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
        """Counter of replies, probes and checks. While it grows, the replica doesn't count as stuck."""
        return self._replies + super().pieces

    async def ask(self, question: AskRequest) -> AskResponse:
        """Return the judge's reply to a question. Raises JudgeError. Cancelling the caller cancels the call to the
        judge."""
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
        """Stop probing, and close the connections to the judge."""
        self.end_probing()
        await self._judges.close()


MAX_QUESTIONS = 10_000
"""Maximum judge requests per reward call; stops endless loops."""
Ask = Callable[[AskRequest], Awaitable[AskResponse]]
"""Async function that asks the judge a question. Raises JudgeError."""


async def no_judge(question: AskRequest) -> AskResponse:
    """Raise NoJudgeError for every question, because the run has no judge."""
    raise NoJudgeError("there is no judge: set roles.judge.model (docs/judge.md)")


class Questions:
    """Forwards one worker's questions to the judge, and returns the replies. The reward call's deadline is paused
    meanwhile.

    Questions outside a reward call are ignored; those of a call are cancelled at its end.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._deadline: Deadline | None = None
        self._count = 0
        self._answers: asyncio.Queue[pb.CarryQuestionsRequest | None] = asyncio.Queue()
        self._asking: set[asyncio.Task[None]] = set()

    async def carry(self, stub: RewardWorkerStub) -> None:
        """Forward the worker's questions to the judge until the worker ends."""
        try:
            async for message in stub.CarryQuestions(Requests(self._answers.get), timeout=None):
                if message.HasField("question"):
                    task = asyncio.create_task(self._answer(message.number, message.question))
                    self._asking.add(task)
                    task.add_done_callback(self._asking.discard)
                else:
                    telemetry.record("judge.replies", 1, {"relaxd.outcome": "unreadable"})
        except RpcError:
            pass  # whoever waits for the worker's scores sees its end, too
        finally:
            self._drop()
            self._answers.put_nowait(None)  # gRPC goes on reading the requests of a stream that has ended

    @contextmanager
    def during(self, deadline: Deadline) -> Iterator[None]:
        """Inside the context, accept questions of one reward call; pause this call's `deadline` during each."""
        self._deadline, self._count = deadline, 0
        try:
            yield
        finally:
            self._deadline = None
            self._drop()

    async def _answer(self, number: int, question: AskRequest) -> None:
        deadline = self._deadline
        if deadline is None:
            return  # the call that asked has ended
        self._count += 1
        answer = pb.CarryQuestionsRequest(number=number)
        deadline.pause()
        try:
            if self._count > MAX_QUESTIONS:
                raise JudgeError(f"the reward asked the judge more than {MAX_QUESTIONS} questions in one call")
            answer.reply.CopyFrom(await self._ask(question))
        except JudgeError as error:
            answer.error, answer.no_judge = str(error), isinstance(error, NoJudgeError)
        finally:
            deadline.resume()
        self._answers.put_nowait(answer)

    def _drop(self) -> None:
        for task in self._asking:
            task.cancel()
