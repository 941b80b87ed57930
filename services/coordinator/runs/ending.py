"""The end of a run: early stopping, the last groups, weights, checkpoint and export, and retention in Redis. The run's
folder stays.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar

import grpc

from relaxd.best_checkpoint import parse_metric
from relaxd.config.run import StopEarlyConfig
from relaxd.reasons import DropReason
from relaxd.roles import ROLLOUT, TRAINER
from relaxd.rpc.errors import explain
from relaxd.v1.trainer_pb2 import ExportHuggingFaceRequest, TrainerSaveCheckpointRequest
from relaxd.v1.trainer_pb2_grpc import TrainerStub
from relaxd.waiting import Wait, waiting
from services.coordinator.fleet.peers import LONG_CALL_SECONDS, NoAnswer, answer
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.state.records import Evaluation, RunRecord
from services.coordinator.state.retries import RedisRetry
from services.coordinator.weights.weight_sync import WeightSync

POLL_SECONDS = 1.0
WATCH_SECONDS = 0.3
"""Seconds between two checks of the board's or the engines' state."""
RELEASE_SECONDS = 30.0
"""Maximum seconds to wait for the trainer to finish its step when a run is stopped early."""
DISK_SECONDS = 5.0
"""Seconds between two attempts of the trainer to write to a full disk."""
PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""gRPC statuses that mean that the trainer is lost, and may return."""
EXPORT_FOLDER = "model"
Result = TypeVar("Result")


class ExportFailed(Exception):
    """The trainer did not write the requested model or checkpoint."""


def reason_to_stop_early(settings: StopEarlyConfig, evaluations: Sequence[Evaluation], since: int) -> str:
    """Return the reason to end a run before its last step, or "". Further evaluations never change a returned reason.

    `since`: only evaluations after this step count as evaluations without an improvement. The initial model's
    evaluation never counts.
    """
    if not settings.metric:
        return ""
    metric, best, worse = parse_metric(settings.metric), 0, 0
    values = metric.values(evaluation.model_dump() for evaluation in evaluations)
    for step, value in values.items():
        if not best or metric.is_better(value, values[best], by=settings.min_delta):
            best, worse = step, 0
        elif step > since:
            worse += 1
        if worse >= settings.patience:
            by = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
            return (
                f"completed early: {settings.metric} has not improved{by} in {worse} evaluations, up to step {step}, "
                f"since {values[best]:.4g} at step {best}"
            )
    return ""


async def await_last_version(context: RunContext, sync: WeightSync, version: int) -> str:
    """Wait until the engines serve a run's last weight version. Return "", or the reason why they don't serve it.

    The time limit does not run while a trainer or engine starts.
    """
    fleet, weights = context.fleet, context.config.weights
    limit = 2 * (weights.connect_timeout_seconds + weights.timeout_seconds)
    seen = unable = time.monotonic()
    while True:
        announced, now = sync.announced, time.monotonic()
        if announced is not None and announced.version == version and sync.up_to_date():
            return ""
        if fleet.has(TRAINER, ROLLOUT):
            seen = now
        if fleet.trainer() is None or not fleet.engines():
            unable = now
        if (lost := fleet.failure()) is not None:
            return lost.reason
        if now - seen > context.config.health.role_timeout_seconds:
            return f"there is no {' and no '.join(fleet.missing())}"
        if now - unable > limit:
            return sync.last_failure or "no synchronisation began"
        await context.registry.changed.wait(WATCH_SECONDS)  # named: by the run


async def clear_board(context: RunContext, redis: RedisRetry) -> None:
    """Wait until the trainer has finished the step in progress, then drop the open groups.

    If groups of an incomplete step are dropped, the trainer starts the step over without them.
    """
    deadline = time.monotonic() + RELEASE_SECONDS
    per_step, begun = context.config.trainer.groups_per_step, None
    with waiting("the trainer to finish its step", on=TRAINER) as wait:
        while time.monotonic() < deadline:
            trainer = context.fleet.trainer()
            counts = await redis.call(context.board.counts)
            begun = counts.last_step if begun is None else begun
            done = counts.last_step > begun or counts.last_step >= context.config.run.steps
            train = (await redis.call(context.board.queues))[-1]
            if trainer is None or done or train.waiting + train.held < per_step:
                break
            wait.on = trainer.replica_id
            wait.reason = f"{trainer.replica_id} to finish step {counts.last_step + 1}, {RELEASE_SECONDS:.0f} s at most"
            await context.registry.changed.wait(WATCH_SECONDS)
    await drop_open_groups(context, redis, DropReason.RUN_ENDED)


async def drop_open_groups(context: RunContext, redis: RedisRetry, reason: DropReason) -> None:
    """Close the admission gate, and drop all open groups."""
    await redis.call(context.board.set_gate, term=context.term, oldest_version=None, open=False)
    groups = await redis.call(context.board.open_groups)
    await redis.call(context.board.drop_groups, groups, term=context.term, reason=reason, counts="")
    await redis.call(context.board.purge, term=context.term)


async def export_model(context: RunContext) -> str:
    """Have the trainer export the model, and return the path of its folder. Waits and fails as `_ask_trainer` does."""
    request = ExportHuggingFaceRequest(folder=EXPORT_FOLDER)
    exported = await _ask_trainer(
        lambda trainer: trainer.ExportHuggingFace(request, timeout=LONG_CALL_SECONDS), context
    )
    return exported.path


async def save_last_checkpoint(context: RunContext) -> None:
    """Have the trainer save a checkpoint of the last step, from which the run can be extended.

    Waits and fails as `_ask_trainer` does.
    """
    request = TrainerSaveCheckpointRequest(rotate=True)
    await _ask_trainer(lambda trainer: trainer.SaveCheckpoint(request, timeout=LONG_CALL_SECONDS), context)


async def _ask_trainer(ask: Callable[[TrainerStub], Awaitable[Result]], context: RunContext) -> Result:
    """Call the trainer without a time limit. If the trainer restarts, wait for it and call again.

    While the trainer's disk is full, wait and call again: a run's last files are not written at a later step.

    Raises ExportFailed: no trainer was registered for health.role_timeout_seconds, or the trainer refuses.
    """
    fleet, away_seconds = context.fleet, context.config.health.role_timeout_seconds
    problem = "no trainer is registered"
    seen = time.monotonic()
    with ExitStack() as waits:
        disk: Wait | None = None
        while (failure := fleet.failure()) is None and time.monotonic() - seen <= away_seconds:
            if fleet.has(TRAINER):
                seen = time.monotonic()
            trainer = fleet.trainer()
            if trainer is not None:
                try:
                    stub = context.peers.trainer(trainer.registration.address)
                    return await answer(ask(stub), trainer, fleet.registry)
                except NoAnswer as error:
                    problem = str(error)
                except grpc.aio.AioRpcError as error:
                    problem = explain(error)
                    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                        disk = disk or waits.enter_context(waiting("", disk=True))
                        disk.reason = f"{trainer.replica_id}'s disk, to write the run's last files: {error.details()}"
                        await asyncio.sleep(DISK_SECONDS)  # named: above
                    elif error.code() not in PASSING:
                        break
            await fleet.registry.changed.wait(POLL_SECONDS)  # named: by the run's `_export`
    raise ExportFailed(str(failure or problem))


@dataclass(frozen=True)
class Retention:
    """Limits on ended runs in Redis. The oldest ended runs are deleted first, and the newest always stays."""

    runs: int
    bytes: int
    """Maximum size in Redis of all ended runs together, in bytes."""
    days: float
    """Maximum time since the end of a run, in days."""

    def expired(self, runs: Sequence[tuple[RunRecord, int]], now: datetime) -> list[str]:
        """Return the ids of ended runs to delete. `runs` has all runs, newest first, each with its size in Redis in
        bytes."""
        expired = []
        kept, taken = 0, 0
        for record, size in runs:
            if not record.phase.ended:
                continue
            ended = record.end_time or record.create_time
            too_many = kept >= self.runs or taken + size > self.bytes or now - ended > timedelta(days=self.days)
            if kept and too_many:
                expired.append(record.run_id)
            else:
                kept, taken = kept + 1, taken + size
        return expired
