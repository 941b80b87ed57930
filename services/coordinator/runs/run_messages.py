"""Runs, steps, samples and health records as protobuf."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from relaxd.board import AsyncBoard, RunMissing
from relaxd.board.committed_steps import CommittedSteps
from relaxd.config import HealthConfig
from relaxd.steady_clock import steady_time
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import health_pb2
from services.coordinator.health.policy import recent
from services.coordinator.state.records import Event, Health, HealthRecord, Phase, RunRecord


def run_state(record: RunRecord) -> "pb.RunState.ValueType":
    """Return a run's visible state."""
    if record.stop_reason and not record.phase.ended:
        return pb.RUN_STATE_STOPPING
    if record.paused is not None and record.phase in (Phase.PENDING, Phase.RUNNING):
        return pb.RUN_STATE_PAUSED
    return pb.RunState.Value(f"RUN_STATE_{record.phase.value}")


async def run_message(record: RunRecord, steps: int, board: AsyncBoard, oldest_version: int | None) -> pb.Run:
    """Convert a run, with its progress from the board."""
    run = pb.Run(
        run_id=record.run_id,
        state=run_state(record),
        outcome=pb.RunOutcome.Value(f"RUN_OUTCOME_{record.outcome or 'UNSPECIFIED'}"),
        reason=record.reason_shown,
        failed_role=record.failed_role,
        failed_instance=record.failed_instance,
        steps=steps,
        folder=record.folder,
        oldest_engine_version=oldest_version,
        config_json=record.config_json,
    )
    run.create_time.FromDatetime(record.create_time)
    if record.end_time is not None:
        run.end_time.FromDatetime(record.end_time)
    with contextlib.suppress(RunMissing):  # it was just created, and has no board yet
        await _add_board(run, board)
    for evaluation in record.evaluations:
        run.metrics.update({**evaluation.metrics, "eval_step": evaluation.step})
    return run


async def _add_board(run: pb.Run, board: AsyncBoard) -> None:
    counts = await board.counts()
    run.step = counts.last_step
    for name in ("published", "open", "trained", "dropped"):
        setattr(run.groups, name, getattr(counts, name))
    run.groups.dropped_by_reason.update(counts.dropped_by_reason)
    for queue in await board.queues():
        run.queues.add(stage=queue.stage, waiting=queue.waiting, held=queue.held)
    if counts.last_step:
        for entry in await board.ledger(counts.last_step - 1):
            run.metrics.update(entry.metrics)


def step_messages(steps: CommittedSteps, after_step: int, limit: int) -> list[pb.StepMetrics]:
    """Return at most `limit` steps after a step. Reads Redis: call it from a thread."""
    messages = []
    for entry in steps(after_step, limit):
        message = pb.StepMetrics(step=entry.step, metrics=entry.metrics)
        message.commit_time.FromNanoseconds(int(entry.time * 1e9))
        messages.append(message)
    return messages


def sample_message(
    sample: dict[str, Any], texts: Callable[[Sequence[int]], list[str]] | None = None
) -> pb.TrainedSample:
    """Convert a trained sample from the board; its keys are fields of TrainedSample.

    `texts` returns the texts of tokens; without it the sample has no tokens.
    """
    fields = pb.TrainedSample.DESCRIPTOR.fields_by_name
    message = pb.TrainedSample(**{key: value for key, value in sample.items() if key in fields and key != "tokens"})
    if texts is not None and (tokens := sample.get("tokens")):
        count = len(tokens["ids"])
        for name, values in tokens.items():
            getattr(message.tokens, name).extend(values * count if len(values) == 1 else values)
        message.tokens.texts.extend(texts(tokens["ids"]))
    return message


def _health_state(state: Health) -> "health_pb2.HealthState.ValueType":
    return health_pb2.HealthState.Value(f"HEALTH_STATE_{state}")


def health_messages(record: HealthRecord, config: HealthConfig) -> list[health_pb2.Health]:
    """Convert a health record: every role, each followed by its replicas."""
    messages = [
        health_pb2.Health(role=role.role, state=_health_state(role.state), reason=role.reason, restarts=role.rebuilds)
        for role in record.roles.values()
    ]
    messages += [
        health_pb2.Health(
            role=one.role,
            instance=one.instance,
            replica_id=one.replica_id,
            state=_health_state(one.state),
            reason=one.reason,
            restarts=len(recent(one.restarts, config, steady_time())),
        )
        for one in record.replicas.values()
    ]
    return sorted(messages, key=lambda message: (message.role, message.instance))


def event_messages(events: Sequence[Event], after: int) -> list[health_pb2.RunEvent]:
    """Convert the events numbered above `after`."""
    messages = []
    for event in events:
        if event.number > after:
            state = _health_state(event.state)
            message = health_pb2.RunEvent(
                number=event.number, role=event.role, instance=event.instance, state=state, text=event.text
            )
            message.create_time.FromDatetime(event.time)
            messages.append(message)
    return messages
