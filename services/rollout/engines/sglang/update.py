"""The request to SGLang's scheduler processes to take up new weights."""

import time

from relaxd.v1 import engine_pb2, rollout_pb2
from services.rollout.engines.sglang.schedulers import SCHEDULER_MARGIN_SECONDS, Schedulers, SchedulersCall


class SchedulerUpdate:
    """Asks every scheduler process to take up new weights: together with the pause for them, or when it has begun."""

    def __init__(
        self, schedulers: Schedulers, receive: rollout_pb2.ReceiveWeightsRequest, key: str, pause_deadline: float
    ) -> None:
        """`key` is the weights' key in the prefix cache. `pause_deadline` is a time by time.monotonic()."""
        self._schedulers = schedulers
        self._request = engine_pb2.UpdateWeightsRequest(receive=receive, key=key)
        self._pause_deadline = pause_deadline
        self._asked: SchedulersCall | None = None
        self.group_name = receive.group_name
        """The group in which the weights come."""

    @property
    def begun(self) -> bool:
        """Whether the scheduler processes were asked."""
        return self._asked is not None

    @property
    def pause_seconds(self) -> float:
        """Seconds in which they have to pause."""
        return max(self._pause_deadline - time.monotonic(), 0.0)

    def begin(self, change: int) -> None:
        """Ask them, once. `change` is the pause that they are told to begin at the same time; 0: they are paused."""
        receive, pause_seconds = self._request.receive, self.pause_seconds if change else 0.0
        self._request.change, receive.pause_timeout_seconds = change, pause_seconds
        timeout = pause_seconds + receive.timeout_seconds + SCHEDULER_MARGIN_SECONDS
        self._asked = self._schedulers.begin("UpdateWeights", self._request, timeout)

    def answers(self) -> list[engine_pb2.UpdateWeightsResponse | Exception]:
        """Return each rank's answer or RpcError, once all have answered or are late."""
        assert self._asked is not None
        return self._schedulers.answers(self._asked)
