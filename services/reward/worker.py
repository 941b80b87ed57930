"""The worker process, which runs rewards one sample at a time. The pool kills it at a sample's deadline."""

import asyncio
import queue
import threading
from concurrent.futures import Future
from typing import Any

from relaxd.process.json_child_server import JsonChildServer
from relaxd.rewards import BadRewardError, Reward, RewardInput, UnknownRewardError, resolve
from relaxd.rewards.calling import call, describe_error, user_traceback

MAX_REASON = 2000
"""Longest reason of a failure, in characters."""


class Rewards:
    """Loads and runs rewards in the main thread, because signals, which some use (math-verify's timeout), need it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Reward] = {}
        self._runner = asyncio.Runner()  # one loop for all samples, so that rewards may keep clients
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], Future[dict[str, Any]]]] = queue.SimpleQueue()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the main thread answer a request. Called in the child server's threads."""
        answer: Future[dict[str, Any]] = Future()
        self._requests.put((request, answer))
        return answer.result()

    def work(self) -> None:
        """Answer requests as long as the process lives."""
        while True:
            request, answer = self._requests.get()
            try:
                answer.set_result(self._score(request) if "sample" in request else self._load(request["reward"]))
            except BaseException as error:  # SystemExit as well: a reward that calls sys.exit() has only failed
                answer.set_result(_failure(error))

    def _load(self, name: str) -> dict[str, Any]:
        self._loaded[name] = resolve(name)
        return {}

    def _score(self, request: dict[str, Any]) -> dict[str, Any]:
        output = call(self._loaded[request["reward"]], RewardInput(**request["sample"]), self._runner)
        return {"reward": output.reward, "parts": output.parts}


def _failure(error: BaseException) -> dict[str, str]:
    """Return the reason of a failure in one line, and the traceback of an exception in the reward's code."""
    if isinstance(error, BadRewardError | UnknownRewardError):
        return {"error": str(error)[:MAX_REASON]}
    return {"error": describe_error(error)[-MAX_REASON:], "traceback": user_traceback(error)[-MAX_REASON:]}


def main() -> None:
    """Serve the pool until its process ends."""
    rewards = Rewards()
    server = JsonChildServer({"load": rewards.ask, "score": rewards.ask})
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()


if __name__ == "__main__":
    main()
