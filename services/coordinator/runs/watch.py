"""The WatchRun stream: limited in time, resumable by token."""

import re
import time
from collections.abc import AsyncIterator

from relaxd.rpc.errors import Violations
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.fleet.changes import Signal
from services.coordinator.health.view import event_messages
from services.coordinator.runs.manager import RunManager, read_board
from services.coordinator.runs.starting import check_run_id
from services.coordinator.runs.view import step_messages

TOKEN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
MAX_SECONDS = 300.0
DEFAULT_SECONDS = 60.0
TICK_SECONDS = 0.25
SILENCE_SECONDS = 1.0
"""Limit of the time between two messages."""
STEPS_AT_ONCE = 200
"""Limit of steps in one message: a watcher may resume after a long time."""


async def watch(
    manager: RunManager, changed: Signal, request: pb.WatchRunRequest
) -> AsyncIterator[pb.WatchRunResponse]:
    """Yield the run at once, at every visible change and at least every second, until the time or the run ends.

    The resume token contains the last step sent and, if there was one, the last event: "7", "7-2".
    """
    violations = Violations()
    check_run_id(request.run_id, violations)
    token = request.resume_token
    valid = not token or TOKEN.fullmatch(token)
    violations.check(valid, "resume_token", "must be empty or a token from an earlier message")
    violations.check(0 <= request.max_seconds <= MAX_SECONDS, "max_seconds", f"must be 0 to {MAX_SECONDS:.0f}")
    violations.raise_if_any()
    record = await manager.record(request.run_id)
    board = manager.board(record)
    end = time.monotonic() + (request.max_seconds or DEFAULT_SECONDS)
    last_step, last_event = _parts(token)
    shown, silent_since = None, 0.0
    while True:
        record = await manager.record(record.run_id)
        run = await manager.message(record)
        if last_step is None:
            last_step = run.step
        events = await manager.events(record)
        newest_event = events[-1].number if events else 0
        last_event = newest_event if last_event is None else last_event
        visible = (run.state, run.reason, run.step, newest_event)
        over = record.phase.ended or time.monotonic() >= end
        if visible != shown or over or time.monotonic() - silent_since >= SILENCE_SECONDS - TICK_SECONDS:
            steps = await read_board(step_messages, board, last_step) if run.step > last_step else []
            steps = steps[:STEPS_AT_ONCE]
            last_step = steps[-1].step if steps else last_step
            news, last_event = event_messages(events, last_event), newest_event
            token = f"{last_step}-{last_event}" if last_event else str(last_step)
            yield pb.WatchRunResponse(resume_token=token, run=run, steps=steps, events=news)
            shown, silent_since = visible, time.monotonic()
            if over and last_step >= run.step:
                return
        if last_step >= run.step:
            await changed.wait(TICK_SECONDS)  # idle: nothing is new


def _parts(token: str) -> tuple[int | None, int | None]:
    """Split a resume token into step and event; None: from now on."""
    match = TOKEN.fullmatch(token)
    if match is None:
        return None, None
    return int(match[1]), int(match[2] or 0)
