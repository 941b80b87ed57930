"""The turns of a colocated run: engines and trainer have the same devices, one of them at a time.

Generate (the engines are awake, the trainer's state is in the host's memory) until all groups of the next step are
ready for it. The engines sleep, the trainer wakes up, trains the step and announces its version. The engines take
memory for weights and receive them, the trainer sleeps, the engines take memory for keys and values: generate.

Nothing of this is kept: who is awake is what replicas say, and what comes next follows from that and from the board
(`gpu_handoff_rules`). So the death of an engine, a trainer or a coordinator in any phase needs no rules of its own. A
replica asks for its turn before it starts (`take_turn`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from relaxd.board import Board, BoardUnavailable
from relaxd.config import RunConfig
from relaxd.rpc.errors import explain
from relaxd.v1.replica_pb2 import ROLE_ROLLOUT, ROLE_TRAINER
from relaxd.v1.rollout_pb2 import (
    MEMORY_PART_KEY_VALUE_CACHE,
    MEMORY_PART_WEIGHTS,
    MemoryPart,
    SleepRequest,
    WakeRequest,
)
from relaxd.v1.trainer_pb2 import TrainerSleepRequest, TrainerWakeRequest
from services.coordinator.fleet.fleet import ABLE, Fleet
from services.coordinator.fleet.peers import Peers
from services.coordinator.fleet.registry import Replica
from services.coordinator.weights.gpu_handoff_rules import Move, Situation, next_move
from services.coordinator.weights.weight_sync import WeightSync

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.05
"""How often the board is asked whether the next step's groups are ready."""
MARGIN_SECONDS = 5.0
"""A call's deadline beyond the deadline that its callee keeps by itself."""
WAITING_SECONDS = 2.0
"""A replica waits for its turn if it has asked within this time; it asks several times a second."""
MAX_RETRY_SECONDS = 2.0


class TurnFailed(Exception):
    """A replica did not sleep or wake up."""


class GpuHandoff:
    """Gives and takes turns for one run, in the coordinator's event loop."""

    def __init__(
        self,
        config: RunConfig,
        board: Board,
        fleet: Fleet,
        peers: Peers,
        sync: WeightSync,
        *,
        training: Callable[[], bool],
        evaluating: Callable[[], bool],
    ) -> None:
        """`training`: whether the run is to train. `evaluating`: whether an evaluation asks the engines, or begins now
        that they might be put to sleep."""
        self._config = config
        self._board = board
        self._fleet = fleet
        self._registry = fleet.registry
        self._peers = peers
        self._sync = sync
        self._training = training
        self._evaluating = evaluating
        self._moving: Move | None = None
        self._metrics: dict[str, float] = {}
        """What changing turns took since the last step, and what memory it freed."""
        self._trainer_needed = 0
        """How many want something of the trainer, whatever the next step."""
        self.last_failure = ""

    def take_turn(self, replica: Replica) -> str:
        """A replica without an engine or ranks wants to start them: why it may not yet; empty: it may."""
        replica.turn(awake=False)
        replica.asked_at = time.monotonic()
        other_role = ROLE_ROLLOUT if replica.registration.role == ROLE_TRAINER else ROLE_TRAINER
        if self._moving is not None:
            return f"others are changing turns ({self._moving})"
        for other in self._registry.of_role(other_role):
            if other.awake is None:
                return f"{other.replica_id} has not said yet whether it has it"
            if other.awake:
                return f"{other.replica_id} has it"
        replica.turn(awake=True)
        replica.asked_at = 0.0
        self._registry.changed.fire()
        return ""

    @contextmanager
    def trainer_awake(self) -> Iterator[None]:
        """Inside, the trainer gets its turn and keeps it."""
        self._trainer_needed += 1
        self._registry.changed.fire()
        try:
            yield
        finally:
            self._trainer_needed -= 1

    async def run_forever(self) -> None:
        """Make one move after the other."""
        delay = 0.0
        while True:
            try:
                move = await self._situation()
                self._moving = move if move != Move.WAIT else None
                if move == Move.WAIT:
                    await self._registry.changed.wait(TICK_SECONDS)
                    continue
                started = time.monotonic()
                await self._make(move)
                logger.info("%s: done in %.3f s", move, time.monotonic() - started)
                self.last_failure, delay = "", 0.0
            except (TurnFailed, BoardUnavailable) as error:
                self.last_failure = str(error)
                delay = min(MAX_RETRY_SECONDS, 2 * delay + 0.1)
                logger.warning("turns: %s; trying again in %.1f s", error, delay)
                await asyncio.sleep(delay)
            finally:
                self._moving = None

    async def _situation(self) -> Move:
        """The next move from how things are."""
        trainers, rollouts = self._registry.of_role(ROLE_TRAINER), self._registry.of_role(ROLE_ROLLOUT)
        if any(replica.awake is None for replica in (*trainers, *rollouts)):
            return Move.WAIT  # an earlier coordinator knew more than this one does yet
        counts = await asyncio.to_thread(self._board.counts)
        ready = await asyncio.to_thread(self._ready_groups)
        trainer, announced = self._fleet.trainer(), self._sync.announced
        engines = self._sync.candidates()
        steps_left = self._training() and counts.last_step < self._config.run.steps
        due = steps_left and ready >= self._config.trainer.groups_per_step
        current = announced is not None and (
            trainer is not None and announced.replica_id == trainer.replica_id and announced.version == counts.last_step
        )
        serving = announced is not None and any(e.version == (announced.term, announced.version) for e in engines)
        waiting = any(map(_waits, trainers))
        situation = Situation(
            trainer="ready" if trainer else "waiting" if waiting else "starting" if _any_awake(trainers) else "absent",
            trainer_awake=trainer is not None and bool(trainer.awake),
            engines_waiting=any(map(_waits, rollouts)),
            engines_starting=any(replica.awake and replica.status.state not in ABLE for replica in rollouts),
            engines_awake=_any_awake(rollouts),
            engines_able=bool(engines),
            engines_serving=serving,
            generating=(serving and steps_left and not due),
            due=due or self._trainer_needed > 0,
            announced=current,
        )
        move = next_move(situation)
        if move in (Move.TRAIN, Move.START_TRAINER) and self._evaluating():
            return Move.WAIT
        return move

    def _ready_groups(self) -> int:
        """Groups that have everything that the trainer needs."""
        return next(depth.waiting + depth.held for depth in self._board.queues() if depth.stage == "train")

    async def _make(self, move: Move) -> None:
        match move:
            case Move.TRAIN:
                await self._sleep_engines()
                await self._wake_trainer()
            case Move.SYNCHRONISE:
                await self._synchronise()
            case Move.START_TRAINER:
                await self._sleep_engines()
            case Move.START_ENGINES:
                await self._sleep_trainer()

    async def _synchronise(self) -> None:
        await self._sleep_engines()
        await self._wake_trainer()
        trainer, announced, engines = self._fleet.trainer(), self._sync.announced, self._sync.candidates()
        if trainer is None or announced is None or not engines:
            raise TurnFailed("the trainer or the engines went before the weights could be sent")
        await self._wake_engines(engines, [MEMORY_PART_WEIGHTS])
        started = time.monotonic()

        async def hand_over() -> None:
            """The weights are there: now the engines have their turn."""
            self._add("switch_transfer_seconds", time.monotonic() - started)
            await self._sleep_trainer()
            await self._wake_engines(engines, [MEMORY_PART_KEY_VALUE_CACHE])
            for engine in engines:
                engine.serves_nothing = False

        if not await self._sync.synchronise(trainer.member, [e.member for e in engines], announced, hand_over):
            raise TurnFailed(f"no weight synchronisation: {self._sync.last_failure}")

    async def _sleep_engines(self) -> None:
        awake = [replica for replica in self._registry.of_role(ROLE_ROLLOUT) if replica.awake]
        if not awake:
            return
        for engine in awake:
            engine.serves_nothing = True  # from now on no prompt is published for it
        seconds = self._config.run.switch_timeout_seconds
        request = SleepRequest(sync_id=self._sync.next_id(), timeout_seconds=seconds)

        async def sleep(engine: Replica) -> Any:
            stub = self._peers.rollout(engine.registration.address)
            answer = await stub.Sleep(request, timeout=seconds + MARGIN_SECONDS)
            engine.turn(awake=False)
            return answer

        answers = await self._timed("switch_engine_sleep_seconds", "sleep", awake, sleep)
        self._metrics["engine_awake_bytes"] = float(sum(answer.memory.before_bytes for answer in answers))
        self._metrics["engine_asleep_bytes"] = float(sum(answer.memory.after_bytes for answer in answers))

    async def _wake_engines(self, engines: Sequence[Replica], parts: Sequence["MemoryPart.ValueType"]) -> None:
        seconds = self._config.run.switch_timeout_seconds
        request = WakeRequest(sync_id=self._sync.next_id(), parts=parts, timeout_seconds=seconds)

        async def wake(engine: Replica) -> Any:
            engine.turn(awake=True)
            stub = self._peers.rollout(engine.registration.address)
            return await stub.Wake(request, timeout=seconds + MARGIN_SECONDS)

        await self._timed("switch_engine_wake_seconds", "wake up", engines, wake)

    async def _sleep_trainer(self) -> None:
        trainer = self._fleet.trainer()
        if trainer is None or not trainer.awake:
            return
        seconds = self._config.run.switch_timeout_seconds
        request = TrainerSleepRequest(sync_id=self._sync.next_id(), timeout_seconds=seconds)

        async def sleep(trainer: Replica) -> Any:
            stub = self._peers.trainer(trainer.registration.address)
            answer = await stub.Sleep(request, timeout=seconds + MARGIN_SECONDS)
            trainer.turn(awake=False)
            return answer

        (answer,) = await self._timed("switch_trainer_offload_seconds", "sleep", [trainer], sleep)
        self._metrics["trainer_awake_bytes"] = float(answer.memory.before_bytes)
        self._metrics["trainer_asleep_bytes"] = float(answer.memory.after_bytes)

    async def _wake_trainer(self) -> None:
        trainer = self._fleet.trainer()
        if trainer is None:
            raise TurnFailed("the trainer went before its turn came")
        seconds = self._config.run.switch_timeout_seconds
        metrics, self._metrics = self._metrics, {}
        request = TrainerWakeRequest(sync_id=self._sync.next_id(), timeout_seconds=seconds, metrics=metrics)

        async def wake(trainer: Replica) -> Any:
            trainer.turn(awake=True)
            stub = self._peers.trainer(trainer.registration.address)
            return await stub.Wake(request, timeout=seconds + MARGIN_SECONDS)

        await self._timed("", "wake up", [trainer], wake)  # the trainer itself enters what that takes

    async def _timed(
        self, metric: str, what: str, replicas: Iterable[Replica], call: Callable[[Replica], Awaitable[Any]]
    ) -> list[Any]:
        """Call replicas at once and wait for all; add the time to a metric. Raises TurnFailed."""
        started, replicas = time.monotonic(), list(replicas)
        answers = await asyncio.gather(*map(call, replicas), return_exceptions=True)
        failed = []
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, grpc.aio.AioRpcError):
                failed.append(f"{replica.replica_id} did not {what}: {explain(answer)}")
            elif isinstance(answer, BaseException):
                raise answer
        if failed:
            raise TurnFailed("; ".join(failed))
        if metric:
            self._add(metric, time.monotonic() - started)
        return list(answers)

    def _add(self, metric: str, seconds: float) -> None:
        self._metrics[metric] = self._metrics.get(metric, 0.0) + seconds


def _waits(replica: Replica) -> bool:
    return time.monotonic() - replica.asked_at < WAITING_SECONDS


def _any_awake(replicas: Iterable[Replica]) -> bool:
    return any(replica.awake for replica in replicas)
