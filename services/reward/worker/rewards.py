"""The rewards of a worker, and its answers to the pool."""

import asyncio
import faulthandler
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

from relaxd.config import RewardConfig
from relaxd.process.child_server import ChildServer
from relaxd.rewards import BadRewardError, RewardOutput, UnknownRewardError
from relaxd.rewards.calling import Outcome, describe_error, user_traceback
from relaxd.rewards.judge.asking import JudgeError, connect
from relaxd.rewards.scorers import Scorer, Single, scorer_of
from relaxd.sandbox.enclosure import Measure, Plan
from relaxd.v1 import reward_pb2, reward_worker_pb2_grpc
from relaxd.v1 import reward_worker_pb2 as pb
from services.reward.samples import samples_of_request
from services.reward.worker.hints import hint
from services.reward.worker.judge_line import JudgeLine

MAX_REASON = 2000
"""Longest reason of a failure, in characters."""


Answer = pb.LoadRewardResponse | pb.ScoreSamplesResponse


class Rewards(reward_worker_pb2_grpc.RewardWorkerServicer):
    """Loads and runs rewards in the main thread, because signals, which some use to limit their time, need it."""

    def __init__(self, plan: Plan | None, measures: Sequence[Measure]) -> None:
        self._plan, self._measures = plan, measures
        self._loaded: dict[str, Scorer] = {}
        self._judge = JudgeLine()
        connect(self._judge)
        self._runner = asyncio.Runner()  # one loop for all samples, so that rewards may keep clients
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Answer], Future[Any]]] = queue.SimpleQueue()

    def LoadReward(self, request: pb.LoadRewardRequest, context: Any) -> pb.LoadRewardResponse:
        """See the proto."""
        return cast(pb.LoadRewardResponse, self._in_main_thread(lambda: self._load(request)))

    def ScoreSamples(self, request: pb.ScoreSamplesRequest, context: Any) -> pb.ScoreSamplesResponse:
        """See the proto."""
        return cast(pb.ScoreSamplesResponse, self._in_main_thread(lambda: self._score(request)))

    async def CarryQuestions(
        self, request_iterator: AsyncIterator[pb.CarryQuestionsRequest], context: Any
    ) -> AsyncIterator[pb.CarryQuestionsResponse]:
        """See the proto."""
        async for question in self._judge.carry(request_iterator):
            yield question

    def work(self) -> None:
        """Run tasks until the process ends."""
        while True:
            task, answer = self._tasks.get()
            answer.set_result(task())

    def _in_main_thread(self, task: Callable[[], Answer]) -> Answer:
        answer: Future[Answer] = Future()
        self._tasks.put((task, answer))
        return answer.result()

    def _load(self, request: pb.LoadRewardRequest) -> pb.LoadRewardResponse:
        answer = pb.LoadRewardResponse(
            enclosure=[pb.Measure(name=one.name, by=one.by, missing=one.missing) for one in self._measures]
        )
        try:
            if request.config_json:
                scorer = scorer_of(RewardConfig.model_validate_json(request.config_json))
            else:
                scorer = Single(request.reward)
        except BaseException as error:  # SystemExit as well: a module that calls sys.exit() has only failed
            answer.error, answer.traceback = self._explain(error)
            return answer
        self._loaded[request.reward] = scorer
        answer.takes_group, answer.awaits = scorer.takes_group, scorer.awaits
        return answer

    def _score(self, asked: pb.ScoreSamplesRequest) -> pb.ScoreSamplesResponse:
        request = asked.request
        # The pool reads from the stacks where a slow reward is. A thread in C writes them: it needs neither the
        # interpreter's lock, which a regular expression may hold, nor a signal, which would wake up a sleep.
        self._judge.slow_seconds = asked.slow_seconds
        faulthandler.dump_traceback_later(asked.slow_seconds)
        try:
            outcomes = self._loaded[request.reward].score(samples_of_request(request), self._runner)
        except Exception as error:
            outcomes = [error] * len(request.responses)
        finally:
            self._judge.slow_seconds = 0.0
            faulthandler.cancel_dump_traceback_later()
        return pb.ScoreSamplesResponse(scores=map(self._to_proto, outcomes))

    def _to_proto(self, outcome: Outcome) -> reward_pb2.Score:
        if isinstance(outcome, RewardOutput):
            return reward_pb2.Score(reward=outcome.reward, parts=outcome.parts)
        reason, traceback = self._explain(outcome)
        return reward_pb2.Score(error=reason, traceback=traceback)

    def _explain(self, error: BaseException) -> tuple[str, str]:
        """Return the reason of a failure in one line, and the traceback of an exception in the reward's code."""
        advice = hint(error, self._plan, self._measures)
        more = f"; {advice}" if advice else ""
        if isinstance(error, BadRewardError | UnknownRewardError | JudgeError):
            return str(error)[:MAX_REASON] + more, ""
        return describe_error(error)[-MAX_REASON:] + more, user_traceback(error)[-MAX_REASON:]


def serve(plan: Plan | None, measures: Sequence[Measure]) -> None:
    """Serve the pool until its process ends.

    Args:
        plan: what this process was allowed; None: everything.
        measures: how it is enclosed.
    """
    rewards = Rewards(plan, measures)
    server = ChildServer((reward_worker_pb2_grpc.add_RewardWorkerServicer_to_server, rewards))
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()
