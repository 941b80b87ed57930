"""The worker process, which runs rewards one sample at a time. The pool kills it at a sample's deadline."""

import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import Any

from relaxd.process.child_server import ChildServer
from relaxd.rewards import BadRewardError, Reward, UnknownRewardError, resolve
from relaxd.rewards.calling import call, describe_error, user_traceback
from relaxd.v1 import reward_pb2, reward_pb2_grpc
from services.reward.samples import samples_of_request

MAX_REASON = 2000
"""Longest reason of a failure, in characters."""


class Rewards(reward_pb2_grpc.RewardServicer):
    """Loads and runs rewards in the main thread, because signals, which some use (math-verify's timeout), need it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Reward] = {}
        self._runner = asyncio.Runner()  # one loop for all samples, so that rewards may keep clients
        self._requests: queue.SimpleQueue[tuple[reward_pb2.ScoreRequest, Future[list[reward_pb2.Score]]]] = (
            queue.SimpleQueue()
        )

    def Score(self, request: reward_pb2.ScoreRequest, context: Any) -> reward_pb2.ScoreResponse:
        """Have the main thread score a sample, or load the reward for a request without one.

        A reward that can't be loaded is a score with an error.
        """
        scores: Future[list[reward_pb2.Score]] = Future()
        self._requests.put((request, scores))
        return reward_pb2.ScoreResponse(scores=scores.result())

    def work(self) -> None:
        """Answer requests as long as the process lives."""
        while True:
            request, scores = self._requests.get()
            try:
                scores.set_result(self._score(request))
            except BaseException as error:  # SystemExit as well: a reward that calls sys.exit() has only failed
                scores.set_result([_failure(error)])

    def _score(self, request: reward_pb2.ScoreRequest) -> list[reward_pb2.Score]:
        if not request.responses:
            self._loaded[request.reward] = resolve(request.reward)
        outputs = call(self._loaded[request.reward], samples_of_request(request), self._runner)
        return [reward_pb2.Score(reward=output.reward, parts=output.parts) for output in outputs]


def _failure(error: BaseException) -> reward_pb2.Score:
    """Return the reason of a failure in one line, and the traceback of an exception in the reward's code."""
    if isinstance(error, BadRewardError | UnknownRewardError):
        return reward_pb2.Score(error=str(error)[:MAX_REASON])
    return reward_pb2.Score(error=describe_error(error)[-MAX_REASON:], traceback=user_traceback(error)[-MAX_REASON:])


def main() -> None:
    """Serve the pool until its process ends."""
    rewards = Rewards()
    server = ChildServer((reward_pb2_grpc.add_RewardServicer_to_server, rewards))
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()


if __name__ == "__main__":
    main()
