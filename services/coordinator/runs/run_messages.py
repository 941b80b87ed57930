"""Conversion of a run's state, steps, samples, health, events, closed groups and service logs to protobuf messages."""

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from relaxd.board import AsyncBoard, RunMissing
from relaxd.board.committed_steps import CommittedSteps
from relaxd.client.service_logs import LogTail, by_time, log_paths
from relaxd.config import HealthConfig
from relaxd.data.tokenizer import PromptTokenizer
from relaxd.models import DataError
from relaxd.models.folders import resolve_model
from relaxd.report.group_outcomes import ConditionError, Test, condition, of_prompt, outcome_message, read_fates
from relaxd.rpc.errors import FailedPrecondition, Violations
from relaxd.run_folder import LOGS
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1 import health_pb2
from relaxd.waiting import steady_time
from services.coordinator.health.policy import recent
from services.coordinator.runs.starting import check_run_id
from services.coordinator.state.records import Event, Health, HealthRecord, Phase, RunRecord


def run_state(record: RunRecord) -> "pb.RunState.ValueType":
    """Return a run's state as clients see it: the phase, unless the run is stopping or paused."""
    if record.stop_reason and not record.phase.ended:
        return pb.RUN_STATE_STOPPING
    if record.paused is not None and record.phase in (Phase.PENDING, Phase.RUNNING):
        return pb.RUN_STATE_PAUSED
    return pb.RunState.Value(f"RUN_STATE_{record.phase.value}")


async def run_message(record: RunRecord, steps: int, board: AsyncBoard, oldest_version: int | None) -> pb.Run:
    """Return the message (pb.Run) about a run: its record, and its progress from the board."""
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
    """Return at most `limit` steps of a run after the given step. Reads Redis: call it from a thread."""
    messages = []
    for entry in steps(after_step, limit):
        message = pb.StepMetrics(step=entry.step, metrics=entry.metrics)
        message.commit_time.FromNanoseconds(int(entry.time * 1e9))
        messages.append(message)
    return messages


def sample_message(
    sample: dict[str, Any], texts: Callable[[Sequence[int]], list[str]] | None = None
) -> pb.TrainedSample:
    """Convert a trained sample from the board to a message. Keys that aren't fields of TrainedSample are left out.

    `texts` converts token ids to texts; without this function the message has no tokens.
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
    """Convert a health record to messages: one for each role, each followed by those for its replicas."""
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
    """Convert the events with numbers above `after` to messages."""
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


MAX_GROUPS = 1000
DEFAULT_GROUPS = 100
MAX_READ_GROUPS = 1_000_000
"""Maximum number of groups that one call reads, newest first; this takes some seconds, in a thread."""

DEFAULT_LOG_LINES = 500
MAX_LINE_LETTERS = 4000
"""Maximum characters of one log line in an answer; longer lines are cut."""
MAX_LOG_BYTES, MIN_LOG_BYTES = 16 << 20, 64 << 10
"""MAX_LOG_BYTES: maximum bytes that one call reads from all logs together. MIN_LOG_BYTES: minimum bytes that it may
read from each log."""
MAX_READ_LINES = 50_000
"""Maximum number of lines that one call reads of each log."""
LATE_LINES = timedelta(seconds=10)
"""Time after a run's end in which log lines still count as the run's."""

logger = logging.getLogger(__name__)


def group_tests(request: pb.GetGroupsRequest) -> list[Test]:
    """Return the filters of a GetGroups request, as functions that test a group. Raises InvalidArgument."""
    violations, tests = Violations(), []
    check_run_id(request.run_id, violations)
    in_range = 0 <= request.max_groups <= MAX_GROUPS
    violations.check(
        in_range, "max_groups", f"is {request.max_groups}: it must be 1 to {MAX_GROUPS}; 0 means {DEFAULT_GROUPS}"
    )
    if request.prompt:
        tests.append(of_prompt(request.prompt))
    if request.where:
        try:
            tests.append(condition(request.where))
        except ConditionError as error:
            violations.check(False, "where", str(error))
    violations.raise_if_any()
    return tests


def find_groups(folder: Path, tests: Sequence[Test], count: int) -> pb.GetGroupsResponse:
    """Return the newest closed groups that pass all `tests`, at most `count` (0: DEFAULT_GROUPS).

    Reads files: call it in a thread.
    """
    found = pb.GetGroupsResponse(complete=True)
    for number, line in enumerate(read_fates(folder)):
        if len(found.groups) == (count or DEFAULT_GROUPS):
            break
        if number == MAX_READ_GROUPS:
            found.complete = False
            break
        if all(test(line) for test in tests):
            found.groups.append(outcome_message(line))
    return found


def read_logs(record: RunRecord, stack_logs: str, request: pb.GetLogsRequest) -> pb.GetLogsResponse:
    """Return the newest log lines of a run: from its folder, or if there are none, those of the run's time from the
    folder `stack_logs`.

    Reads files: call it in a thread. Raises FailedPrecondition: there are no logs; InvalidArgument: this service has
    none.
    """
    first, last, paths = "", "", log_paths(Path(record.folder) / LOGS)
    if not paths and stack_logs:
        paths, first = log_paths(Path(stack_logs)), _log_time(record.create_time)
        last = _log_time(record.end_time + LATE_LINES) if record.end_time else ""
    if not paths:
        raise FailedPrecondition(
            f"the coordinator has no logs of run {record.run_id}: its services write them elsewhere, such as in "
            "containers (docker compose logs, kubectl logs) or to a collector (docs/deploy.md)",
            reason="NO_LOGS",
        )
    chosen = log_paths(paths[0].parent, request.service)
    services = [path.stem for path in paths]
    violations = Violations()
    known = ", ".join(services)
    violations.check(bool(chosen), "service", f"is {request.service!r}: there are logs of {known}")
    violations.raise_if_any()
    tails = [LogTail(path, max(MIN_LOG_BYTES, MAX_LOG_BYTES // len(chosen))) for path in chosen]
    word, found = request.text.casefold(), []
    for line in by_time(tails, [tail.read(MAX_READ_LINES) for tail in tails]):
        in_time = not line.time or (first <= line.time and (not last or line.time <= last))
        if in_time and line.is_problem >= request.only_problems and word in line.text.casefold():
            found.append(line)
    response = pb.GetLogsResponse(services=services)
    for line in found[-(request.max_lines or DEFAULT_LOG_LINES) :]:
        text = line.text[:MAX_LINE_LETTERS]
        message = response.lines.add(service=line.service, text=text, is_problem=line.is_problem)
        with contextlib.suppress(ValueError):  # no time, or what a user's code wrote like one
            message.log_time.FromJsonString(line.time)
    return response


def _log_time(time: datetime) -> str:
    """Format a time like the timestamps in logs."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def token_texts(record: RunRecord) -> Callable[[Sequence[int]], list[str]]:
    """Return a function that converts token ids to texts; it returns [] if the run's tokenizer can't be read.

    Reads files: call it in a thread.
    """
    try:
        model = json.loads(record.config_json)["model"]["path"]
        return PromptTokenizer(resolve_model(model, weights=False)).texts
    except DataError as error:
        logger.warning("samples are shown without the texts of their tokens: %s", error.message)
        return lambda tokens: []
