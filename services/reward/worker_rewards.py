"""The server of a reward worker: loads and runs rewards, asks the judge, and explains which setting lifts a limit."""

import asyncio
import errno
import faulthandler
import itertools
import queue
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, cast

from relaxd.alerts.user_messages import take_messages
from relaxd.config import RewardConfig
from relaxd.process.child_server import ChildServer, Outbox
from relaxd.rewards import BadRewardError, RewardOutput, UnknownRewardError
from relaxd.rewards.calling import Outcome, describe_error, user_traceback
from relaxd.rewards.judge import JudgeError, NoJudgeError, connect
from relaxd.rewards.scorers import Scorer, Single, scorer_of
from relaxd.sandbox.enclosure import PROCESSES, Measure, Plan
from relaxd.v1 import reward_pb2, reward_worker_pb2_grpc
from relaxd.v1 import reward_worker_pb2 as pb
from relaxd.v1.judge_pb2 import AskRequest, AskResponse
from services.reward.samples import samples_of_request

_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)
_LOOKS_LIKE_NO_NETWORK = (
    *("Network is unreachable", "Network unreachable", "name resolution", "Name or service not known"),
    *("Could not resolve host", "Couldn't connect to server", "Failed to connect to"),
)
"""Texts in errors that mean a missing network. Libraries and programs without error numbers write them."""
_LOOKS_LIKE_NOT_ALLOWED = (
    *("Permission denied", "Read-only file system", "unable to open database file", "readonly database"),
)
"""Texts in errors that mean a forbidden file. sqlite3 and C++ and Rust libraries such as torch and safetensors write
them."""
_FILES = (
    "rewards write only temporary files (tempfile), and can't read relaxd's secrets: name what else they write, or its "
    'folder, in reward.writable, or set reward.sandbox = "off"'
)
MOST_CAUSES = 20
"""Maximum number of errors that are examined along an error's chain of causes."""


def hint(error: BaseException, plan: Plan | None, measures: Sequence[Measure]) -> str:
    """Return which limit of the enclosure caused an error and which setting lifts the limit; "" if none did."""
    if plan is None:
        return ""
    held = {one.name: one.by for one in measures if one.by}
    for one in _causes(error):
        if "network" in held and _is_no_network(one):
            return "rewards have no network: set reward.network = true"
        if "memory" in held and isinstance(one, MemoryError):
            return f"a process of a reward has at most {plan.memory_bytes} bytes: raise reward.worker_memory_bytes"
        if "processes" in held and _is_no_process(one):
            return f'a reward has at most {PROCESSES} processes and threads; reward.sandbox = "off" has no limit'
        refused = _is_refused_file(one)
        if refused and "files" in held:
            return _FILES
        if refused and "user" in held:
            return f'rewards run as {held["user"]}; as the service\'s with reward.sandbox = "off"'
    return ""


def _is_no_network(error: BaseException) -> bool:
    if isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno == errno.ENETUNREACH):
        return True
    return any(text in _text(error) for text in _LOOKS_LIKE_NO_NETWORK)


def _is_refused_file(error: BaseException) -> bool:
    if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
        return error.filename is not None  # else it isn't about a file
    return any(text in _text(error) for text in _LOOKS_LIKE_NOT_ALLOWED)


def _text(error: BaseException) -> str:
    """Return an error's text; for a failed program, its stored output instead."""
    if not isinstance(error, subprocess.CalledProcessError):
        return str(error)
    said = error.stderr or error.output or ""
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def _is_no_process(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN and not isinstance(error, socket.gaierror)
    return isinstance(error, RuntimeError) and "can't start new thread" in str(error)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then its cause, then the cause's cause, at most MOST_CAUSES in all."""
    for _ in range(MOST_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


class JudgeLine:
    """Sends the rewards' judge questions to the reward service, from any thread, and waits for the replies."""

    def __init__(self) -> None:
        self.slow_seconds = 0.0
        """Seconds after which the stack traces of a running reward are written, except while it waits for the judge; 0
        means never."""
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
        """Send questions to the service and receive the replies, until the service ends the call."""
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


MAX_REASON = 2000
"""Maximum length of a failure's reason, in characters."""


Answer = pb.LoadRewardResponse | pb.ScoreSamplesResponse


class Rewards(reward_worker_pb2_grpc.RewardWorkerServicer):
    """Loads and runs rewards in the main thread, because some rewards limit their time with signals, which require
    it."""

    def __init__(self, plan: Plan | None, measures: Sequence[Measure]) -> None:
        self._plan, self._measures = plan, measures
        self._loaded: dict[str, Scorer] = {}
        self._judge = JudgeLine()
        connect(self._judge)
        self._runner = asyncio.Runner()  # one loop for all samples, so that rewards may keep clients
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Answer], Future[Any]]] = queue.SimpleQueue()

    def LoadReward(self, request: pb.LoadRewardRequest, context: Any) -> pb.LoadRewardResponse:
        return cast(pb.LoadRewardResponse, self._in_main_thread(lambda: self._load(request)))

    def ScoreSamples(self, request: pb.ScoreSamplesRequest, context: Any) -> pb.ScoreSamplesResponse:
        return cast(pb.ScoreSamplesResponse, self._in_main_thread(lambda: self._score(request)))

    async def CarryQuestions(
        self, request_iterator: AsyncIterator[pb.CarryQuestionsRequest], context: Any
    ) -> AsyncIterator[pb.CarryQuestionsResponse]:
        async for question in self._judge.carry(request_iterator):
            yield question

    def work(self) -> None:
        """In the main thread, run tasks that other threads queue, until the process ends."""
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
        return pb.ScoreSamplesResponse(scores=map(self._to_proto, outcomes), user_messages=take_messages())

    def _to_proto(self, outcome: Outcome) -> reward_pb2.Score:
        if isinstance(outcome, RewardOutput):
            return reward_pb2.Score(reward=outcome.reward, parts=outcome.parts)
        reason, traceback = self._explain(outcome)
        return reward_pb2.Score(error=reason, traceback=traceback, no_judge=isinstance(outcome, NoJudgeError))

    def _explain(self, error: BaseException) -> tuple[str, str]:
        """Return the reason of a failure in one line, and the traceback of an exception in the reward's code."""
        advice = hint(error, self._plan, self._measures)
        more = f"; {advice}" if advice else ""
        if isinstance(error, BadRewardError | UnknownRewardError | JudgeError):
            return str(error)[:MAX_REASON] + more, ""
        return describe_error(error)[-MAX_REASON:] + more, user_traceback(error)[-MAX_REASON:]


def serve(plan: Plan | None, measures: Sequence[Measure]) -> None:
    """Serve the worker pool until the pool's process ends.

    Args:
        plan: plan of this process's enclosure; None: it is not enclosed.
        measures: measures of the enclosure, and which of them hold.
    """
    rewards = Rewards(plan, measures)
    server = ChildServer((reward_worker_pb2_grpc.add_RewardWorkerServicer_to_server, rewards))
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()
