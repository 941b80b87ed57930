"""Updates of the weights in a scheduler process of SGLang, and its reports to the engine's process."""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq
from sglang.srt.utils.network import get_zmq_socket

from relaxd.process.upkeep import IdleThreads
from relaxd.rpc.errors import Aborted, RpcError
from services.rollout.engines.request_types import EngineError
from services.rollout.engines.sglang.scheduler_messages import (
    GroupLeft,
    HeldRequest,
    News,
    PauseForUpdate,
    Updated,
    UpdateEnded,
)
from services.rollout.engines.sglang.schedulers import END_SECONDS
from services.rollout.engines.sglang.sglang_media import forget_features
from services.rollout.engines.sglang.sglang_weights import Reception, SGLangWeights

logger = logging.getLogger(__name__)


class NewsSender:
    """Sends reports to the engine's process, in order, from any thread."""

    def __init__(self, address: str) -> None:
        """`address`: the engine's (see `schedulers.news_address`)."""
        self._socket: Any = get_zmq_socket(zmq.Context(1), zmq.PUSH, address, False)
        self._lock = threading.Lock()

    def tell(self, news: News) -> None:
        """Send a report."""
        with self._lock:
            self._socket.send_pyobj(news)


class WeightUpdates:
    """Installs weights in pauses of the loop, and reports to the engine's process."""

    def __init__(
        self, weights: SGLangWeights, rank: int, news: NewsSender, commit: Callable[[str], dict[str, HeldRequest]]
    ) -> None:
        """`commit` switches to received weights by their key."""
        self._weights = weights
        self._rank = rank
        self._news = news
        self._commit = commit
        self._threads = IdleThreads()
        self._receiving: list[str] = []
        """Groups in which an update receives."""
        self._ended = threading.Condition()
        """Lock of `_receiving`; notified at the end of an update."""

    def begin(self, message: PauseForUpdate) -> None:
        """Begin an update. The loop calls this in the pause, which lasts until the update ends."""
        if time.monotonic() > message.deadline:
            self._weights.leave(message.group_name)  # ends the update for ranks that have begun to receive
            self._news.tell(UpdateEnded(message.number, self._rank, EngineError("the scheduler paused too late")))
            return
        with self._ended:
            self._receiving.append(message.group_name)
        try:
            begun = self._weights.begin(message.group_name, message.timeout)
        except Exception as error:
            self._end(message, _told(error))
        else:
            self._threads.run("update", partial(self._finish, message, begun))

    @property
    def receiving(self) -> bool:
        """True if an update is under way."""
        return bool(self._receiving)

    def leave(self, name: str) -> bool:
        """Leave a weight group, even during a reception, and report once nothing is received in it any more.

        Returns whether the model is unusable, because a failed broadcast had touched it.
        """
        self._weights.leave(name)
        with self._ended:
            ended = self._ended.wait_for(lambda: name not in self._receiving, END_SECONDS)
        if ended:
            self._news.tell(GroupLeft(name, self._rank))
        return self._weights.unusable

    def _finish(self, message: PauseForUpdate, begun: Reception) -> None:
        held: dict[str, HeldRequest] = {}
        try:
            received = self._weights.finish(
                begun, checksum=message.checksum, commit=lambda: held.update(self._commit(message.key))
            )
        except Exception as error:
            self._end(message, _told(error))
        else:
            if message.after_failure or received.towers_changed:
                forget_features()
            self._end(message, Updated(received.seconds, received.checksums, held if self._rank == 0 else {}))

    def _end(self, message: PauseForUpdate, result: Updated | RpcError) -> None:
        self._news.tell(UpdateEnded(message.number, self._rank, result))
        with self._ended:
            self._receiving.remove(message.group_name)
            self._ended.notify_all()


def _told(error: Exception) -> RpcError:
    """Return an error in the form for the engine's process."""
    if isinstance(error, RpcError):
        return error
    logger.error("an update failed", exc_info=error)
    return Aborted(f"{type(error).__name__}: {error}")
