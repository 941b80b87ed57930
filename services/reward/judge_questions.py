"""The service's end of the connection on which a worker's rewards ask the judge."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from relaxd import telemetry
from relaxd.process.child_channel import Requests
from relaxd.rewards.judge.asking import JudgeError, NoJudgeError
from relaxd.rpc.errors import RpcError
from relaxd.v1 import reward_worker_pb2 as pb
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from relaxd.v1.reward_worker_pb2_grpc import RewardWorkerStub
from services.reward.deadline import Deadline

MAX_QUESTIONS = 10_000
"""Maximum judge requests per reward call; stops endless loops."""
Ask = Callable[[AskRequest], Awaitable[AskResponse]]
"""Asks the judge. Raises JudgeError."""


async def no_judge(question: AskRequest) -> AskResponse:
    """Refuse every question."""
    raise NoJudgeError("there is no judge: set roles.judge.model (docs/judge.md)")


class Questions:
    """Forwards the questions of one worker to the judge, and the replies back, while the clock of the call stands
    still.

    Only questions within a call are put to the judge; they are dropped with it.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._deadline: Deadline | None = None
        self._count = 0
        self._answers: asyncio.Queue[pb.CarryQuestionsRequest | None] = asyncio.Queue()
        self._asking: set[asyncio.Task[None]] = set()

    async def carry(self, stub: RewardWorkerStub) -> None:
        """Forward questions until the worker ends."""
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
        """Accept questions of one call of a reward, inside the block."""
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
