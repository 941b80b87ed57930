"""Pauses, resumptions and weight updates of SGLang's scheduler processes, as an engine's gate requires."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

from relaxd.rpc.errors import RpcError
from relaxd.v1 import rollout_pb2
from services.rollout.engines.generation_gate import GenerationGate, UpdatePause
from services.rollout.engines.request_types import EngineError, PauseMode, Version
from services.rollout.engines.sglang.scheduler_launch import MessageChannel
from services.rollout.engines.sglang.schedulers import (
    ANSWER_SECONDS,
    SCHEDULER_MARGIN_SECONDS,
    STEP_SECONDS,
    ChangeMade,
    GroupLeft,
    Late,
    PauseForUpdate,
    Schedulers,
    Updated,
    UpdateEnded,
)


class SchedulerUpdate:
    """One update of the weights in all scheduler processes, during one pause. Call its methods with the gate's lock
    held."""

    def __init__(
        self,
        number: int,
        ranks: int,
        receive: rollout_pb2.ReceiveWeightsRequest,
        key: str,
        pause_deadline: float,
        *,
        after_failure: bool,
    ) -> None:
        """`number`: the update's number; `ranks`: number of scheduler processes; `key`: key of the weights in prefix
        caches.

        `pause_deadline`: monotonic time by which the pause must have begun; `after_failure`: True if an update has
        failed since the last successful one.
        """
        self._number = number
        self._ranks = ranks
        self._receive = receive
        self._key = key
        self._pause_deadline = pause_deadline
        self._after_failure = after_failure
        self._pause_seconds = pause_deadline - time.monotonic()
        self._end = 0.0
        self._results: dict[int, Updated | RpcError] = {}
        self.asked = False
        """True once the request to update was sent to the scheduler processes."""
        self.change = 0
        """Number of the pause that the update's request began; 0 if the schedulers were already paused."""
        self.group_name = receive.group_name
        """Name of the weight group through which the weights come."""

    def ask(self, mode: PauseMode, change: int) -> PauseForUpdate:
        """Return the message that asks the scheduler processes to update, to be sent once, and set `change`: number of
        the pause that the message begins, 0 for none."""
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
            after_failure=self._after_failure,
        )

    def take(self, news: UpdateEnded | GroupLeft) -> None:
        """Record a scheduler process's report if it concerns this update."""
        if isinstance(news, UpdateEnded):
            if news.number == self._number:
                self._results[news.rank] = news.result
        elif news.group_name == self.group_name:
            left = EngineError(f"weight group {self.group_name} was left before the scheduler paused")
            self._results.setdefault(news.rank, left)

    @property
    def ended(self) -> bool:
        """True if every scheduler process has reported that it installed the weights or failed."""
        return len(self._results) == self._ranks

    @property
    def pause_seconds(self) -> float:
        """Remaining seconds until the update's pause must have begun."""
        return max(self._pause_deadline - time.monotonic(), 0.0)

    @property
    def seconds(self) -> float:
        """Remaining seconds of the update; meaningful once the request was sent."""
        return max(self._end - time.monotonic(), 0.0)

    def not_paused(self) -> EngineError:
        """Return the error for an update whose pause did not begin in time."""
        return EngineError(f"the engine did not pause within {self._pause_seconds:.3g} s")

    def results(self) -> list[Updated | RpcError]:
        """Return the result of each scheduler process, by rank; Late for one that has not reported."""
        return [
            self._results.get(rank, Late(f"scheduler {rank} did not receive the weights in time"))
            for rank in range(self._ranks)
        ]


LEFT = "the weight group was left before the engine paused"
"""Error message of an update whose weight group was left before the update began."""


class SchedulerControl:
    """Pauses and resumes an engine's scheduler processes as the gate requires, in a thread that runs `supervise`.

    It uses the gate's lock.
    """

    def __init__(
        self,
        gate: GenerationGate,
        channel: MessageChannel,
        schedulers: Schedulers,
        *,
        admit: Callable[[], None],
        drained: Callable[[], bool],
        end_all: Callable[[], None],
    ) -> None:
        """`admit` sends waiting requests to the schedulers; `drained` returns True if no request is running. Both are
        called with the lock held.

        `end_all` ends all requests; it is called during a pause.
        """
        self._gate = gate
        self._channel = channel
        self._schedulers = schedulers
        self._admit = admit
        self._drained = drained
        self._end_all = end_all
        self._state: PauseMode | None = None
        """Mode in which the schedulers are paused: in_place or retract; None while they run."""
        self._changes = 0
        """Number of pauses and resumptions that were sent to the schedulers; each has a number from this count."""
        self._made = [0] * schedulers.count
        """Number of the last pause or resumption that each scheduler has completed, by rank."""
        self._changing = False
        """True while a pause or resumption of the schedulers is in progress."""
        self._pausing: PauseMode | None = None
        """Mode of the pause that an update's request has begun and that `supervise` must still wait for; None without
        one."""
        self._update: SchedulerUpdate | None = None
        """The weight update in progress; None if there is none."""
        self._commits = 0
        self._told = threading.Condition(gate.lock)
        """Condition on the gate's lock, notified at each report of a scheduler."""

    @property
    def running(self) -> bool:
        """True if the schedulers aren't paused. The caller must hold the lock."""
        return self._state is None

    def prefix_key(self, weights: Version) -> str:
        """Return the key that these weights have in the schedulers' prefix caches."""
        return f"{weights.term}:{weights.version}:{self._commits}"  # two commits of one version have two keys

    def supervise(self) -> None:
        """Pause and resume the schedulers as the gate requires, for ever. Raises EngineError if a scheduler takes too
        long."""
        gate = self._gate
        while True:
            with gate.changed:
                gate.end_lease()
                if (pausing := self._pausing) is None:
                    abort = gate.take_abort()
                    wanted = self._wanted_state()
                    if wanted == self._state and not abort:
                        if self._state is None:
                            gate.leave_rest()
                            self._admit()
                            gate.wait()  # idle: until the engine is paused or ends
                        else:
                            gate.rest()
                        continue
                    self._changing = True
            if pausing is not None:
                self._finish_change(pausing)
                continue
            self._set_state("retract" if abort else wanted)
            if abort:
                self._end_all()

    def read_news(self) -> None:
        """Receive and record the schedulers' reports, for ever."""
        while True:
            news = self._schedulers.receive_news()
            with self._gate.changed:
                if isinstance(news, ChangeMade):
                    self._made[news.rank] = max(self._made[news.rank], news.number)
                elif self._update is not None:
                    self._update.take(news)
                self._told.notify_all()

    def change_memory(self, message: ReleaseMemoryOccupationReqInput | ResumeMemoryOccupationReqInput) -> None:
        """Make all schedulers free or allocate memory in the same iteration of their loops.

        The schedulers must be paused in mode retract. Raises EngineError if one doesn't answer.
        """
        self._channel.send(message)
        try:
            self._set_state("retract")  # changes nothing, but waits for the schedulers
        except RpcError as error:
            raise EngineError(f"the schedulers did not change their memory: {error}") from error

    @contextmanager
    def update(
        self, weights: Version, receive: rollout_pb2.ReceiveWeightsRequest, pause: UpdatePause | None
    ) -> Iterator[None]:
        """Inside the context, make every scheduler process install `weights`.

        Without `pause` the engine must be paused or quarantined already, and `wait_update` sends the request to update.
        With `pause`, in mode in_place or retract, the engine is paused for the update; running schedulers get a single
        message, which pauses them and contains the request.
        """
        gate = self._gate
        with ExitStack() as block:
            with gate.changed:  # at once, so that the pause is not sent without its update
                block.enter_context(gate.update(weights) if pause is None else gate.pause_and_update(pause, weights))
                block.callback(self._forget_update)
                self._commits += 1
                deadline = time.monotonic() + ANSWER_SECONDS if pause is None else pause.deadline
                self._update = SchedulerUpdate(
                    self._commits,
                    self._schedulers.count,
                    receive,
                    self.prefix_key(weights),
                    deadline,
                    after_failure=gate.quarantined,
                )
                if pause is not None and self.running and not self._changing:
                    self._channel.send(self._update.ask(pause.mode, self._next_change()))
                    self._pausing, self._changing = pause.mode, True
            yield

    def wait_update(self) -> list[Updated | RpcError]:
        """Wait for the update, and return each scheduler process's result; Late for a process that has none in time.
        Call it inside `update`.

        Raises EngineError if the schedulers don't pause in time, or if the group was left before the request was sent.
        In the first case they may have received the request: make them leave the group.
        """
        gate = self._gate
        with gate.changed:
            update = self._update
            if update is None:
                raise EngineError(LEFT)
            gate.changed.wait_for(lambda: update.asked or gate.at_rest or self._update is None, update.pause_seconds)
            if self._update is None:
                raise EngineError(LEFT)
            if not update.asked and gate.at_rest:  # they were paused before
                self._channel.send(update.ask(self._state or "in_place", 0))
            paused = update.asked and self._told.wait_for(
                lambda: min(self._made) >= update.change or update.ended, update.pause_seconds
            )
            if not update.asked:
                self._update = None  # so that the request is not sent later
            if not paused:
                raise update.not_paused()
        return self.last_results(update.seconds)

    def last_results(self, timeout: float) -> list[Updated | RpcError]:
        """Wait up to `timeout` seconds, and return each scheduler process's result; Late for a process without one. []
        if the update's request was not sent.

        Call it inside `update`.
        """
        with self._gate.changed:
            update = self._update
            if update is None or not update.asked:
                return []
            self._told.wait_for(lambda: update.ended, timeout)
            return update.results()

    def end_update(self, group_name: str, timeout: float) -> None:
        """After a weight group was left, wait up to `timeout` seconds for the end of an update that used the group.

        Cancels the update if its request was not sent yet.
        """
        gate = self._gate
        with gate.changed:
            update = self._update
            if update is not None and update.group_name != group_name:
                return
            if update is not None and not update.asked:
                self._update = None
                gate.changed.notify_all()
            gate.wait_no_update(timeout)

    def _forget_update(self) -> None:
        with self._gate.changed:
            self._update = None

    def _wanted_state(self) -> PauseMode | None:
        gate = self._gate
        if gate.may_run():
            return "in_place" if gate.mode == "drain" and self._drained() else None
        if gate.mode == "retract":
            return "retract"
        return self._state or "in_place"

    def _set_state(self, state: PauseMode | None) -> None:
        """Pause the schedulers in mode `state`, or resume them if this is None. Wait until all have done so and their
        devices have finished earlier work."""
        message: Any
        with self._gate.changed:
            rid = str(self._next_change())
        if state is None:
            message = ContinueGenerationReqInput(rid=rid, torch_empty_cache=False)
        else:
            message = PauseGenerationReqInput(rid=rid, mode=state)
        self._channel.send(message)
        self._finish_change(state)

    def _finish_change(self, state: PauseMode | None) -> None:
        """Wait until all schedulers have completed the last pause or resumption. Raises EngineError after
        STEP_SECONDS."""
        with self._gate.changed:
            if not self._told.wait_for(lambda: min(self._made) >= self._changes, STEP_SECONDS):
                late = [rank for rank, made in enumerate(self._made) if made < self._changes]
                raise EngineError(f"schedulers {late} did not pause or resume within {STEP_SECONDS:g} s")
            self._state, self._pausing, self._changing = state, None, False

    def _next_change(self) -> int:
        self._changes += 1
        return self._changes
