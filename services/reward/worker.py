"""A process that runs rewards, one sample at a time; the pool kills it when a reward takes too long."""

import queue
import threading
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from relaxd.process.child_server import ChildServer
from relaxd.rewards import BadRewardError, Reward, RewardInput, UnknownRewardError, check_output, resolve

MAX_REASON = 2000
"""Longest reason of a failure that is passed on, in characters."""


class Rewards:
    """The rewards that this process has loaded, and what it is asked to do with them.

    Rewards run in the main thread, because some use signals (math-verify's timeout does), which work nowhere else.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Reward] = {}
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], Future[dict[str, Any]]]] = queue.SimpleQueue()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Have the main thread answer a request; called in the threads of the child server."""
        answer: Future[dict[str, Any]] = Future()
        self._requests.put((request, answer))
        return answer.result()

    def work(self) -> None:
        """Answer requests for as long as the process lives."""
        while True:
            request, answer = self._requests.get()
            try:
                answer.set_result(self._score(request) if "sample" in request else self._load(request["reward"]))
            except BaseException as error:  # SystemExit too: a reward that calls sys.exit() has failed, no more
                answer.set_result({"error": _reason(error)})

    def _load(self, name: str) -> dict[str, Any]:
        self._loaded[name] = resolve(name)
        return {}

    def _score(self, request: dict[str, Any]) -> dict[str, Any]:
        output = check_output(self._loaded[request["reward"]](RewardInput(**request["sample"])))
        return {"reward": output.reward, "parts": output.parts}


def _reason(error: BaseException) -> str:
    """What went wrong, in one line; for an exception of the reward's own, where."""
    if isinstance(error, BadRewardError | UnknownRewardError):
        return str(error)[:MAX_REASON]
    text = f"{type(error).__name__}: {error}".strip(": ")[:MAX_REASON]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


def main() -> None:
    """Serve the pool until it is gone."""
    rewards = Rewards()
    server = ChildServer({"load": rewards.ask, "score": rewards.ask})
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()


if __name__ == "__main__":
    main()
