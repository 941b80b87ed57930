"""The worker process, which runs rewards one sample at a time. The pool kills it at a sample's deadline."""

import queue
import threading
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from relaxd.process.json_child_server import JsonChildServer
from relaxd.rewards import BadRewardError, Reward, RewardInput, UnknownRewardError, check_output, resolve

MAX_REASON = 2000
"""Longest reason of a failure, in characters."""


class Rewards:
    """Loads and runs rewards in the main thread, because signals, which some use (math-verify's timeout), need it."""

    def __init__(self) -> None:
        self._loaded: dict[str, Reward] = {}
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
                answer.set_result({"error": _reason(error)})

    def _load(self, name: str) -> dict[str, Any]:
        self._loaded[name] = resolve(name)
        return {}

    def _score(self, request: dict[str, Any]) -> dict[str, Any]:
        output = check_output(self._loaded[request["reward"]](RewardInput(**request["sample"])))
        return {"reward": output.reward, "parts": output.parts}


def _reason(error: BaseException) -> str:
    """Return the reason of a failure in one line, with the place of an exception in the reward's code."""
    if isinstance(error, BadRewardError | UnknownRewardError):
        return str(error)[:MAX_REASON]
    text = f"{type(error).__name__}: {error}".strip(": ")[:MAX_REASON]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{text} ({Path(frame.filename).name}, line {frame.lineno}, in {frame.name})"


def main() -> None:
    """Serve the pool until its process ends."""
    rewards = Rewards()
    server = JsonChildServer({"load": rewards.ask, "score": rewards.ask})
    threading.Thread(target=server.serve, name="requests", daemon=True).start()
    rewards.work()


if __name__ == "__main__":
    main()
