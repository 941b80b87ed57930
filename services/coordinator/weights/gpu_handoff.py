"""GPU handoff of a colocated run: engines and trainer share the same devices and take turns.

The engines generate, with the trainer's state in host memory, until all groups of the next step are ready. Then the
engines sleep, and the trainer wakes up, trains the step and announces its version. The engines allocate and receive the
weights, the trainer sleeps, the engines allocate their key-value cache and generate again.

A judge with a share of the engines' GPUs (roles.judge.gpu_share) sleeps and wakes up with them. The groups of a step
are ready only with their rewards, so when the trainer's turn begins, the judge has answered all questions about them.
If a judge can't wake up for too long (`HandoffFailures`), health management restarts it, and no turn waits for it
meanwhile.

No state is stored: replicas report whether they are awake, and the next move follows from that and from the board
(`next_move`). So the death of an engine, a trainer or a coordinator needs no special rules. A replica
requests the GPU before it starts (`request_gpu`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

import grpc

from relaxd.board import BoardUnavailable
from relaxd.roles import JUDGE, ROLLOUT, TRAINER
from relaxd.rpc.errors import explain
from relaxd.v1.judge_pb2 import JudgeSleepRequest, JudgeSleepResponse, JudgeWakeRequest
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from relaxd.v1.rollout_pb2 import (
    MEMORY_PART_KEY_VALUE_CACHE,
    MEMORY_PART_WEIGHTS,
    SleepRequest,
    WakeRequest,
)
from relaxd.v1.trainer_pb2 import TrainerSleepRequest, TrainerWakeRequest
from relaxd.waiting import Backoff
from services.coordinator.fleet.registry import Replica
from services.coordinator.fleet.run_fleet import ABLE, RunContext
from services.coordinator.weights.weight_sync import WeightSync


class HandoffMove(StrEnum):
    """A move of the GPU handoff: which replicas sleep and which wake up next."""

    WAIT = "wait"
    """No move now: a replica works, is starting, or is missing."""
    TRAIN = "train"
    """Put the engines to sleep and wake the trainer up."""
    SYNCHRONISE = "synchronise"
    """Send the trainer's weights to the engines, put the trainer to sleep and let the engines generate."""
    START_TRAINER = "start the trainer"
    """Put the engines to sleep, so that the trainer that waits for the GPUs can load its model."""
    START_ENGINES = "start engines"
    """Put the trainer to sleep, so that replicas that wait for the GPUs can start their engines."""
    WAKE_JUDGES = "wake the judges"
    """Wake up the judges on the GPUs of serving engines."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """State of replicas, weights and board on which the next GPU handoff depends."""

    trainer: Literal["absent", "waiting", "starting", "ready"]
    """State of the trainer. "waiting": for the GPU, without a model. "starting": it has the GPU and isn't ready."""
    trainer_awake: bool
    """True if the trainer holds device memory."""
    engines_waiting: bool = False
    """True if any rollout or judge replica that has no model yet waits for the GPU."""
    engines_starting: bool = False
    """True if any rollout or judge replica has the GPU but no model yet."""
    engines_awake: bool = False
    """True if any engine holds device memory."""
    engines_able: bool = False
    """True if any engine, awake or asleep, can receive weights now."""
    engines_serving: bool = False
    """True if any engine serves the announced version."""
    generating: bool = False
    """True while the engines have work: groups of the next step, or an evaluation."""
    due: bool = False
    """True if the trainer has work: all groups of the next step are ready, or a checkpoint or export is requested."""
    judges_asleep: bool = False
    """True if any judge that takes turns is asleep, except judges that are given up. Judges that are awake or have no
    model count as engines in the fields above."""
    announced: bool = False
    """True if the present trainer has announced the newest step's version."""


def next_move(now: Situation) -> HandoffMove:
    """Return the next move for a situation. No move takes a device from a replica that is starting on it."""
    # Judges come first: without them no groups become ready, so the engines' turn would never end. If the groups are
    # ready anyway, other judges have answered, and the turn doesn't wait for a sleeping judge.
    turn_ends = now.due and not now.generating
    trainer_holds = now.trainer_awake or now.trainer == "starting"
    if now.judges_asleep and now.engines_serving and not trainer_holds and not turn_ends:
        return HandoffMove.WAKE_JUDGES
    if now.engines_starting or now.trainer in ("absent", "starting"):
        return HandoffMove.WAIT
    if now.trainer == "waiting":
        return HandoffMove.START_TRAINER if now.engines_awake and not now.generating else HandoffMove.WAIT
    if now.due:
        turn_is_over = now.engines_awake or not now.trainer_awake
        return HandoffMove.TRAIN if turn_is_over and not now.generating else HandoffMove.WAIT
    if now.engines_waiting:
        return HandoffMove.START_ENGINES if now.trainer_awake else HandoffMove.WAIT
    if now.engines_able and now.announced and not now.engines_serving:
        return HandoffMove.SYNCHRONISE
    return HandoffMove.WAIT


PATIENCE = 3
"""Time for which a process's handoff calls may fail before the process is given up, as a multiple of
run.switch_timeout_seconds."""


@dataclass(frozen=True)
class HandoffFailure:
    """Consecutive failed handoff calls of one process."""

    action: str
    """The failed action, such as "wake up"."""
    error: str
    """Error message of the last failed call."""
    began: float
    ended: float
    """Clock times in seconds at which the first failed call began and the last one ended."""

    @property
    def seconds(self) -> float:
        """Seconds between the first failed call's start and the last failed call's end."""
        return self.ended - self.began

    def __str__(self) -> str:
        return f"it has not been able to {self.action} for {self.seconds:.0f} s: {self.error}"


class HandoffFailures:
    """Records for how long handoff calls to each process have failed. A new process starts without failures."""

    def __init__(self, switch_timeout_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_seconds = PATIENCE * switch_timeout_seconds
        self._clock = clock
        self._failures: dict[str, HandoffFailure] = {}

    def failed(self, replica_id: str, action: str, error: str, began: float) -> None:
        """Record a failed call that began at time `began`. The first time is kept while the same action fails
        repeatedly."""
        before = self._failures.get(replica_id)
        first = before.began if before is not None and before.action == action else began
        self._failures[replica_id] = HandoffFailure(action, error, first, self._clock())

    def worked(self, replica_id: str) -> None:
        """Forget a process's failures, because it has answered a call."""
        self._failures.pop(replica_id, None)

    def of(self, replica_id: str) -> HandoffFailure | None:
        """Return the failed calls of a process; None if its last call worked."""
        return self._failures.get(replica_id)

    def given_up(self, replica_id: str) -> bool:
        """Return True if a process is given up, because its calls have failed for longer than allowed.

        Health management then restarts it, and turns don't wait for it.
        """
        failure = self._failures.get(replica_id)
        return failure is not None and failure.seconds > self._limit_seconds


logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
"""Seconds between two checks of the board for the next step's groups."""
MARGIN_SECONDS = 5.0
"""Seconds by which a call's deadline exceeds the deadline that the callee enforces."""
WAITING_SECONDS = 2.0
"""Seconds for which a replica counts as waiting after its last request, which it repeats several times a second."""
BACKOFF = Backoff(first_seconds=0.1, max_seconds=2.0)
SLEEP_REQUESTS: dict[str, Callable[..., Any]] = {
    TRAINER: TrainerSleepRequest,
    ROLLOUT: SleepRequest,
    JUDGE: JudgeSleepRequest,
}
WAKE_REQUESTS: dict[str, Callable[..., Any]] = {
    TRAINER: TrainerWakeRequest,
    ROLLOUT: WakeRequest,
    JUDGE: JudgeWakeRequest,
}
"""Types of wake-up requests, by role name."""


class HandoffFailed(Exception):
    """A replica did not release or take the GPU in a handoff."""


class GpuHandoff:
    """Moves the GPUs of one run between engines and trainer. Lives in the event loop."""

    def __init__(
        self,
        context: RunContext,
        sync: WeightSync,
        *,
        training: Callable[[], bool],
        evaluating: Callable[[], bool],
    ) -> None:
        """`training` returns True while the run trains. `evaluating` starts an evaluation that is due, and returns True
        while an evaluation uses the engines."""
        self._context = context
        self._fleet = context.fleet
        self._registry = context.registry
        self._sync = sync
        self._training = training
        self._evaluating = evaluating
        self._moving: HandoffMove | None = None
        self._metrics: dict[str, float] = {}
        """Durations of the handoffs since the last step, and device memory before and after them, by metric."""
        self._resting = False
        """True once `rest` was called: no further moves are made."""
        self._trainer_users = 0
        """Number of callers inside `trainer_awake`."""
        self._failures = HandoffFailures(context.config.run.switch_timeout_seconds)
        self.last_failure = ""

    @property
    def waiting_for(self) -> str:
        """Description of the handoff in progress, the last failure and the judges that turns don't wait for. Empty if
        there is nothing to tell."""
        moving = self._moving or ""
        failed = f"the last attempt failed: {self.last_failure}" if self.last_failure else ""
        return "; ".join(filter(None, (moving, failed, *map(self._lost, self._judges()))))

    def failure(self, replica: Replica) -> tuple[HandoffFailure, bool] | None:
        """Return the failed calls of an engine or judge, and whether it is given up; None if its last call worked."""
        found = self._failures.of(replica.replica_id)
        return None if found is None else (found, self._failures.given_up(replica.replica_id))

    def _lost(self, judge: Replica) -> str:
        """Return a sentence about why turns don't wait for a judge; empty if they wait."""
        failure = self.failure(judge)
        return f"{judge.replica_id} is not waited for: {failure[0]}" if failure is not None and failure[1] else ""

    def request_gpu(self, replica: Replica) -> str:
        """Request the GPU for a replica without an engine or ranks. Returns "" if the GPU is granted, otherwise the
        reason for the refusal."""
        replica.request_gpu()
        trainers = self._registry.of_role(TRAINER)
        others = self._engines() if replica.registration.role == TRAINER else trainers
        if self._moving is not None:
            return f"a handoff is in progress ({self._moving})"
        for other in others:
            if other.awake is None:
                return f"{other.replica_id} has not reported yet whether it holds the GPU"
            if other.awake:
                return f"{other.replica_id} holds the GPU"
        replica.grant_gpu()
        self._registry.changed.fire()
        return ""

    @contextmanager
    def trainer_awake(self) -> Iterator[None]:
        """Wake the trainer up, and keep it awake inside the context."""
        self._trainer_users += 1
        self._registry.changed.fire()
        try:
            yield
        finally:
            self._trainer_users -= 1

    async def rest(self) -> None:
        """Stop moving GPUs between replicas, and return once the current move has ended.

        Call it before replicas learn of the run's end: a replica that leaves the run makes a move fail.
        """
        self._resting = True
        self._registry.changed.fire()
        while self._moving is not None:
            await self._registry.changed.wait(TICK_SECONDS)  # idle: `waiting_for` says it

    async def run_forever(self) -> None:
        """Make moves until cancelled at the end of the run; then clear the replicas' turn state."""
        try:
            await self._move_forever()
        finally:
            for replica in (*self._registry.of_role(TRAINER), *self._engines()):
                replica.end_turns()

    async def _move_forever(self) -> None:
        failures = 0
        while True:
            try:
                move = await self._next_move()
                if move == HandoffMove.WAIT or self._resting:
                    await self._registry.changed.wait(TICK_SECONDS)  # idle: there is nothing to move
                    continue
                self._moving = move
                started = time.monotonic()
                await self._make(move)
                logger.info("%s: done in %.3f s", move, time.monotonic() - started)
                self.last_failure, failures = "", 0
            except (HandoffFailed, BoardUnavailable) as error:
                self.last_failure = str(error)
                failures += 1
                delay = BACKOFF.pause(failures)
                logger.warning("GPU handoff: %s; retrying in %.1f s", error, delay)
                await asyncio.sleep(delay)  # named: `last_failure` says why
            finally:
                self._moving = None

    def _judges(self) -> list[Replica]:
        """Return the judges that take turns on the GPUs; none if judges have GPUs for themselves."""
        return self._registry.of_role(JUDGE) if self._context.config.roles.judge.shares_gpus else []

    def _engines(self) -> list[Replica]:
        """Return the replicas that hold the GPUs in the engines' turn: engines and judges."""
        return [*self._registry.of_role(ROLLOUT), *self._judges()]

    async def _next_move(self) -> HandoffMove:
        """Return the next move, which follows from the replicas' states and the board."""
        trainers, rollouts = self._registry.of_role(TRAINER), self._engines()
        if any(replica.awake is None for replica in (*trainers, *rollouts)):
            return HandoffMove.WAIT  # not reported yet since this coordinator started
        counts = await self._context.board.counts()
        ready = await self._ready_groups()
        trainer, announced = self._fleet.trainer(), self._sync.announced
        engines = self._sync.candidates()
        steps_left = self._training() and counts.last_step < self._context.config.run.steps
        due = steps_left and ready >= self._context.config.trainer.groups_per_step
        current = announced is not None and (
            trainer is not None and announced.replica_id == trainer.replica_id and announced.version == counts.last_step
        )
        serving = announced is not None and any(e.version == (announced.term, announced.version) for e in engines)
        waiting = any(map(_is_waiting, trainers))
        situation = Situation(
            trainer="ready" if trainer else "waiting" if waiting else "starting" if _any_awake(trainers) else "absent",
            trainer_awake=trainer is not None and bool(trainer.awake),
            engines_waiting=any(map(_is_waiting, rollouts)),
            engines_starting=any(replica.awake and replica.status.state not in ABLE for replica in rollouts),
            engines_awake=_any_awake(rollouts),
            engines_able=bool(engines),
            engines_serving=serving,
            generating=(serving and steps_left and not due),
            due=due or self._trainer_users > 0,
            judges_asleep=bool(self._sleeping_judges()),
            announced=current,
        )
        move = next_move(situation)
        if move in (HandoffMove.TRAIN, HandoffMove.START_TRAINER) and self._evaluating():
            return HandoffMove.WAIT
        return move

    async def _ready_groups(self) -> int:
        """Return the number of groups on the board that are ready to train."""
        queues = await self._context.board.queues()
        return next(depth.waiting + depth.held for depth in queues if depth.stage == "train")

    async def _make(self, move: HandoffMove) -> None:
        match move:
            case HandoffMove.TRAIN:
                await self._sleep_engines()
                await self._wake_trainer()
            case HandoffMove.SYNCHRONISE:
                await self._synchronise()
            case HandoffMove.START_TRAINER:
                await self._sleep_engines()
            case HandoffMove.START_ENGINES:
                await self._sleep_trainer()
            case HandoffMove.WAKE_JUDGES:
                await self._wake_judges()

    async def _synchronise(self) -> None:
        await self._sleep_engines()
        await self._wake_trainer()
        trainer, announced, engines = self._fleet.trainer(), self._sync.announced, self._sync.candidates()
        if trainer is None or announced is None or not engines:
            raise HandoffFailed("the trainer or the engines were lost before the weights could be sent")
        await self._wake("switch_engine_wake_seconds", engines, parts=[MEMORY_PART_WEIGHTS])
        started = time.monotonic()

        async def hand_over() -> None:
            """Once the engines have the weights, put the trainer to sleep and let the engines generate."""
            self._add("switch_transfer_seconds", time.monotonic() - started)
            await self._sleep_trainer()
            try:
                await self._wake_judges()
            except HandoffFailed as error:  # no reason to send the weights again
                logger.warning("GPU handoff: %s; trying again once the engines serve", error)
            await self._wake("switch_engine_wake_seconds", engines, parts=[MEMORY_PART_KEY_VALUE_CACHE])
            for engine in engines:
                engine.set_serving(serving=True)

        if not await self._sync.synchronise(trainer.member, [e.member for e in engines], announced, hand_over):
            raise HandoffFailed(f"no weight synchronisation: {self._sync.last_failure}")

    async def _sleep_engines(self) -> None:
        awake = [replica for replica in self._engines() if replica.awake]
        if not awake:
            return
        for engine in awake:
            engine.set_serving(serving=False)  # closes the gate: no prompt is published for it
        answers = await self._sleep("switch_engine_sleep_seconds", awake)
        # Engines report all memory in use on their GPUs, which includes that of judges.
        self._record_memory("engine", [one for one in answers if not isinstance(one, JudgeSleepResponse)] or answers)

    def _sleeping_judges(self) -> list[Replica]:
        """Return the judges that are asleep with a loaded model, except those given up."""
        ready = [judge for judge in self._judges() if judge.status.state == REPLICA_STATE_READY and not judge.awake]
        return [judge for judge in ready if not self._failures.given_up(judge.replica_id)]

    async def _wake_judges(self) -> None:
        await self._wake("switch_engine_wake_seconds", self._sleeping_judges())

    async def _sleep_trainer(self) -> None:
        trainer = self._fleet.trainer()
        if trainer is not None and trainer.awake:
            self._record_memory("trainer", await self._sleep("switch_trainer_offload_seconds", [trainer]))

    async def _wake_trainer(self) -> None:
        trainer = self._fleet.trainer()
        if trainer is None:
            raise HandoffFailed("the trainer was lost before it could wake up")
        metrics, self._metrics = self._metrics, {}
        await self._wake("", [trainer], metrics=metrics)  # the trainer records this duration itself

    async def _sleep(self, metric: str, replicas: Sequence[Replica]) -> list[Any]:
        """Put replicas to sleep, and return their answers. Adds the duration to the metric. Raises HandoffFailed."""
        seconds = self._context.config.run.switch_timeout_seconds
        sync_id = self._sync.next_id()

        async def sleep(replica: Replica) -> Any:
            request = SLEEP_REQUESTS[replica.registration.role](sync_id=sync_id, timeout_seconds=seconds)
            answer = await self._stub(replica).Sleep(request, timeout=seconds + MARGIN_SECONDS)
            replica.set_awake(awake=False)
            return answer

        return await self._timed(metric, "sleep", replicas, sleep)

    async def _wake(self, metric: str, replicas: Sequence[Replica], **fields: Any) -> None:
        """Wake replicas up; `fields`: those of their requests. Adds the duration to the metric, unless its name is
        empty. Raises HandoffFailed."""
        seconds = self._context.config.run.switch_timeout_seconds
        sync_id = self._sync.next_id()

        async def wake(replica: Replica) -> Any:
            replica.set_awake(awake=True)
            request = WAKE_REQUESTS[replica.registration.role](sync_id=sync_id, timeout_seconds=seconds, **fields)
            return await self._stub(replica).Wake(request, timeout=seconds + MARGIN_SECONDS)

        await self._timed(metric, "wake up", replicas, wake)

    def _stub(self, replica: Replica) -> Any:
        peers = self._context.peers
        stubs = {TRAINER: peers.trainer, ROLLOUT: peers.rollout, JUDGE: peers.judge}
        return stubs[replica.registration.role](replica.registration.address)

    def _record_memory(self, who: str, answers: Sequence[Any]) -> None:
        """Record, for the next step's metrics, the device memory before and after Sleep that the responses report."""
        self._metrics[f"{who}_awake_bytes"] = float(sum(answer.memory.before_bytes for answer in answers))
        self._metrics[f"{who}_asleep_bytes"] = float(sum(answer.memory.after_bytes for answer in answers))

    async def _timed(
        self, metric: str, action: str, replicas: Sequence[Replica], call: Callable[[Replica], Awaitable[Any]]
    ) -> list[Any]:
        """Call all replicas concurrently and return their answers. Adds the duration to the metric, unless its name is
        empty. Raises HandoffFailed."""
        started = time.monotonic()
        answers = await asyncio.gather(*map(call, replicas), return_exceptions=True)
        failed = []
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                if replica.registration.role != TRAINER:  # the trainer's service outlives its ranks and restarts them
                    self._failures.failed(replica.replica_id, action, explain(answer), started)
                failed.append(f"{replica.replica_id} did not {action}: {explain(answer)}")
            elif isinstance(answer, BaseException):
                raise answer
            else:
                self._failures.worked(replica.replica_id)
        if failed:
            raise HandoffFailed("; ".join(failed))
        if metric:
            self._add(metric, time.monotonic() - started)
        return list(answers)

    def _add(self, metric: str, seconds: float) -> None:
        self._metrics[metric] = self._metrics.get(metric, 0.0) + seconds


def _is_waiting(replica: Replica) -> bool:
    return time.monotonic() - replica.gpu_requested_at < WAITING_SECONDS


def _any_awake(replicas: Iterable[Replica]) -> bool:
    return any(replica.awake for replica in replicas)
