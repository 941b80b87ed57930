"""The worker's end of the line on which its rewards ask the judge."""

import asyncio
import faulthandler
import itertools
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future

from relaxd.process.child_server import Outbox
from relaxd.rewards.judge.asking import JudgeError, NoJudgeError
from relaxd.v1 import reward_worker_pb2 as pb
from relaxd.v1.judge_pb2 import AskRequest, AskResponse


class JudgeLine:
    """Sends questions to the service, from any thread, and waits for the replies."""

    def __init__(self) -> None:
        self.slow_seconds = 0.0
        """Seconds after which the stacks of a reward that doesn't wait for the judge are written; 0: never."""
        self._questions: Outbox[pb.CarryQuestionsResponse] = Outbox()
        self._numbers = itertools.count(1)
        self._open: dict[int, Future[pb.CarryQuestionsRequest]] = {}
        self._lock = threading.Lock()

    async def ask(self, question: AskRequest) -> AskResponse:
        number, answered = next(self._numbers), Future[pb.CarryQuestionsRequest]()
        with self._lock:
            self._open[number] = answered
            faulthandler.cancel_dump_traceback_later()
        try:
            self._questions.put(pb.CarryQuestionsResponse(number=number, question=question))
            answer = await asyncio.wrap_future(answered)
        finally:
            with self._lock:
                del self._open[number]
                if not self._open and self.slow_seconds:
                    faulthandler.dump_traceback_later(self.slow_seconds)
        if not answer.HasField("reply"):
            raise NoJudgeError(answer.error) if answer.no_judge else JudgeError(answer.error)
        return answer.reply

    def count_unreadable(self) -> None:
        self._questions.put(pb.CarryQuestionsResponse())

    async def carry(self, answers: AsyncIterator[pb.CarryQuestionsRequest]) -> AsyncIterator[pb.CarryQuestionsResponse]:
        """Exchange questions and answers with the service, until it ends the call."""
        taking = asyncio.create_task(self._take(answers))
        try:
            async for question in self._questions:
                yield question
        finally:
            taking.cancel()

    async def _take(self, answers: AsyncIterator[pb.CarryQuestionsRequest]) -> None:
        async for answer in answers:
            with self._lock:
                asked = self._open.get(answer.number)
            if asked is not None and asked.set_running_or_notify_cancel():
                asked.set_result(answer)
