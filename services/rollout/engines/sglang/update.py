"""The engine's view of an update of SGLang's scheduler processes."""

import time

from relaxd.rpc.errors import RpcError
from relaxd.v1 import rollout_pb2
from services.rollout.engines.sglang.messages import GroupLeft, PauseForUpdate, Updated, UpdateEnded
from services.rollout.engines.sglang.schedulers import SCHEDULER_MARGIN_SECONDS, Late
from services.rollout.engines.types import EngineError, PauseMode


class SchedulerUpdate:
    """Has every scheduler process take up new weights, in one pause. Needs a lock of its owner."""

    def __init__(
        self, number: int, ranks: int, receive: rollout_pb2.ReceiveWeightsRequest, key: str, pause_deadline: float
    ) -> None:
        """`number` is the update's, `ranks` that of scheduler processes, `key` the weights' in the prefix cache.

        `pause_deadline` is a time by time.monotonic().
        """
        self._number = number
        self._ranks = ranks
        self._receive = receive
        self._key = key
        self._pause_deadline = pause_deadline
        self._pause_seconds = pause_deadline - time.monotonic()
        self._end = 0.0
        self._results: dict[int, Updated | RpcError] = {}
        self.asked = False
        """True once the update was requested of the scheduler processes."""
        self.change = 0
        """Number of the pause that the message began; 0: none, they were paused already."""
        self.group_name = receive.group_name
        """The group in which the weights come."""

    def ask(self, mode: PauseMode, change: int) -> PauseForUpdate:
        """Return the message that asks them, to be sent once. `change` is as above."""
        self.asked, self.change = True, change
        paused = self._pause_deadline if change else time.monotonic()
        self._end = paused + self._receive.timeout_seconds + SCHEDULER_MARGIN_SECONDS
        return PauseForUpdate(
            rid=str(change),
            mode=mode,
            number=self._number,
            group_name=self.group_name,
            key=self._key,
            checksum=self._receive.checksum,
            deadline=self._pause_deadline,
            timeout=self._receive.timeout_seconds,
        )

    def take(self, news: UpdateEnded | GroupLeft) -> None:
        """Take what a scheduler process tells. It may be about another update."""
        if isinstance(news, UpdateEnded):
            if news.number == self._number:
                self._results[news.rank] = news.result
        elif news.group_name == self.group_name:
            left = EngineError(f"weight group {self.group_name} was left before the scheduler paused")
            self._results.setdefault(news.rank, left)

    @property
    def ended(self) -> bool:
        """True if all scheduler processes have taken up the weights or failed to."""
        return len(self._results) == self._ranks

    @property
    def pause_seconds(self) -> float:
        """Seconds that are left to pause."""
        return max(self._pause_deadline - time.monotonic(), 0.0)

    @property
    def seconds(self) -> float:
        """Remaining seconds of the update since its request."""
        return max(self._end - time.monotonic(), 0.0)

    def not_paused(self) -> EngineError:
        """Return the error of an update whose pause did not begin in time."""
        return EngineError(f"the engine did not pause within {self._pause_seconds:.3g} s")

    def results(self) -> list[Updated | RpcError]:
        """Return each rank's result; Late for a rank without one."""
        return [
            self._results.get(rank, Late(f"scheduler {rank} did not receive the weights in time"))
            for rank in range(self._ranks)
        ]
