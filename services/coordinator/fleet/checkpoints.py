"""Requests checkpoints from the trainer and waits for a critic's checkpoints."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from relaxd.roles import CRITIC
from relaxd.rpc.errors import FailedPrecondition, ResourceExhausted, RpcError, Unavailable, explain
from relaxd.run_folder import KEPT, checkpoint_path, checkpoint_steps, critic_folder
from relaxd.v1.replica_pb2 import REPLICA_STATE_FAILED
from relaxd.v1.trainer_pb2 import TrainerSaveCheckpointRequest, TrainerSaveCheckpointResponse
from relaxd.waiting import duration, waiting
from services.coordinator.fleet.peers import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.fleet.registry import Replica
from services.coordinator.fleet.run_fleet import RunContext

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.3


class NoCriticCheckpoint(Exception):
    """The critic has not saved the checkpoint. The exception's message says why the wait was given up."""


class CriticPatience:
    """Decides how long to wait for a critic's checkpoint. The critic may die, restart and repeat steps meanwhile."""

    def __init__(
        self,
        *,
        away_seconds: float,
        failed_seconds: float,
        still_seconds: float,
        max_restarts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to wait for the critic's checkpoint.

        Args:
            away_seconds: maximum seconds without any critic.
            failed_seconds: maximum seconds for which a critic may report that it has failed; it retries meanwhile.
            still_seconds: maximum seconds without a change in the critic's reports, such as while it writes the
                checkpoint.
            max_restarts: maximum number of times that a new process replaces the critic.
            clock: function that returns monotonic seconds.
        """
        self._limits = away_seconds, failed_seconds, still_seconds, max_restarts
        self._clock = clock
        self._seen = self._moved = clock()
        self._failing: float | None = None
        self._ids: set[str] = set()
        self._last: tuple[object, ...] = ()

    def exhausted(self, critic: Replica | None) -> str:
        """Return the reason to stop waiting, or "" to go on. Call it more often than once per lease duration.

        `critic`: the run's newest critic, if any.
        """
        now = self._clock()
        away, failed, still, max_restarts = self._limits
        if critic is None:
            return f"no critic has been there for {duration(now - self._seen)}" if now - self._seen > away else ""
        self._seen, status = now, critic.status
        self._ids.add(critic.replica_id)
        # Progress also grows while a critic is idle, so it counts only together with a detail, which an idle critic
        # lacks.
        doing = (critic.replica_id, status.state, status.detail, status.progress if status.detail else 0)
        if doing != self._last:
            self._last, self._moved = doing, now
        if status.state != REPLICA_STATE_FAILED:
            self._failing = None
        elif self._failing is None:
            self._failing = now
        if self._failing is not None and now - self._failing > failed:
            return f"{critic.replica_id} has failed: {status.detail or 'it gives no reason'}"
        if len(self._ids) - 1 > max_restarts:
            return f"it was started again {len(self._ids) - 1} times, more than health.max_restarts = {max_restarts}"
        if now - self._moved > still:
            return f"{critic.replica_id} has made no progress for {duration(now - self._moved)}"
        return ""


async def await_critic(context: RunContext, run_folder: Path, step: int, *, kept: bool = False) -> None:
    """Wait until the critic has saved the checkpoint of a step that the trainer requested.

    Return at once in a run without a critic service. Accept a checkpoint of a later step, too: a critic that is still
    writing an earlier checkpoint saves the next one afterwards. Keep waiting while the critic restarts.

    Args:
        context: the run.
        run_folder: the run's folder.
        step: the checkpoint's step.
        kept: True to accept only checkpoints that are never removed.

    Raises:
        NoCriticCheckpoint: the critic has been away, has failed or has stood still for too long.
    """
    if context.config.roles.critic.placement != "service":
        return
    health = context.config.health
    patience = CriticPatience(
        away_seconds=health.role_timeout_seconds,
        failed_seconds=health.failed_seconds,
        still_seconds=context.config.trainer.checkpoint.timeout_seconds,
        max_restarts=health.max_restarts,
    )
    awaited = f"the critic's checkpoint of step {step}"
    with waiting(awaited, on=CRITIC) as wait:
        while not await asyncio.to_thread(_has_checkpoint, run_folder, step, kept):
            critic = context.fleet.newest(CRITIC)
            if problem := patience.exhausted(critic):
                raise NoCriticCheckpoint(f"there is no checkpoint of the critic of step {step}: {problem}")
            wait.on = critic.replica_id if critic is not None else CRITIC
            detail = critic.status.detail if critic is not None else "it isn't there, and is expected back"
            wait.reason = f"{awaited}: {detail}" if detail else awaited
            await context.registry.changed.wait(POLL_SECONDS)


def _has_checkpoint(run_folder: Path, step: int, kept: bool) -> bool:
    """Return True if the critic has a checkpoint of this step or a later one. Only complete checkpoints have their
    final name."""
    folder = critic_folder(run_folder)
    found = (number for number in checkpoint_steps(folder) if number >= step)
    return any(not kept or (checkpoint_path(folder, number) / KEPT).exists() for number in found)


async def save_candidate(context: RunContext, version: int) -> None:
    """Have the trainer save a checkpoint of the version under evaluation, as a candidate for the best version.

    The trainer has these weights only until its next step ends.
    """
    try:
        saved = await save_checkpoint(context, rotate=True)
    except RpcError as error:
        logger.warning("version %d can't become the best, because it has no checkpoint: %s", version, error)
        return
    if saved.weights.version != version:
        logger.warning(
            "version %d can't become the best: the trainer was at version %d when its checkpoint was asked for",
            *(version, saved.weights.version),
        )


async def save_checkpoint(context: RunContext, *, rotate: bool) -> TrainerSaveCheckpointResponse:
    """Have the run's trainer save a checkpoint, without a time limit. Without `rotate` the checkpoint is never removed.

    Raises Unavailable: no trainer is ready, or the trainer is lost meanwhile; FailedPrecondition: the trainer refuses;
    ResourceExhausted: the trainer's disk is full.
    """
    trainer = context.fleet.trainer()
    if trainer is None:
        raise Unavailable("no trainer is ready")
    stub = context.peers.trainer(trainer.registration.address)
    try:
        call = stub.SaveCheckpoint(TrainerSaveCheckpointRequest(rotate=rotate), timeout=LONG_CALL_SECONDS)
        with waiting("the trainer to save a checkpoint", on=trainer.replica_id):
            return await answer(call, trainer, context.registry)
    except NoAnswer as error:
        raise Unavailable(str(error)) from error
    except grpc.aio.AioRpcError as error:
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            raise FailedPrecondition(error.details() or "the trainer refuses") from error
        if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise ResourceExhausted(error.details() or "the trainer's disk is full") from error
        raise Unavailable(f"{trainer.replica_id}: {explain(error)}") from error
