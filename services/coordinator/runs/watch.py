"""Watching a run: a bounded stream that goes on where the last one ended."""

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
"""There is a message at least this often."""
STEPS_AT_ONCE = 200
"""Most steps in one message, so that a watcher who was away for long doesn't get one that is too large."""


async def watch(
    manager: RunManager, changed: Signal, request: pb.WatchRunRequest
) -> AsyncIterator[pb.WatchRunResponse]:
    """Yield the run now, at every change that people see, and at least every second, until the time or the run is over.

    The resume token is the last step that was told, and the last event, where there was one: "7", "7-2".
    """
    violations = Violations()
    check_run_id(request.run_id, violations)
    token = request.resume_token
    known = not token or TOKEN.fullmatch(token)
    violations.check(known, "resume_token", "must be empty, or come from an earlier message")
    violations.check(0 <= request.max_seconds <= MAX_SECONDS, "max_seconds", f"must be 0 to {MAX_SECONDS:.0f}")
    violations.raise_if_any()
    record = await manager.record(request.run_id)
    board = manager.board(record)
    end = time.monotonic() + (request.max_seconds or DEFAULT_SECONDS)
    told, heard = _parts(token)
    shown, silent_since = None, 0.0
    while True:
        record = await manager.record(record.run_id)
        run = await manager.message(record)
        if told is None:
            told = run.step
        events = await manager.events(record)
        last = events[-1].number if events else 0
        heard = last if heard is None else heard
        face = (run.state, run.reason, run.step, last)
        over = record.phase.ended or time.monotonic() >= end
        if face != shown or over or time.monotonic() - silent_since >= SILENCE_SECONDS - TICK_SECONDS:
            steps = await read_board(step_messages, board, told) if run.step > told else []
            steps = steps[:STEPS_AT_ONCE]
            told = steps[-1].step if steps else told
            news, heard = event_messages(events, heard), last
            token = f"{told}-{heard}" if heard else str(told)
            yield pb.WatchRunResponse(resume_token=token, run=run, steps=steps, events=news)
            shown, silent_since = face, time.monotonic()
            if over and told >= run.step:
                return
        if told >= run.step:
            await changed.wait(TICK_SECONDS)


def _parts(token: str) -> tuple[int | None, int | None]:
    """Step and event of a resume token; None: from now on."""
    match = TOKEN.fullmatch(token)
    if match is None:
        return None, None
    return int(match[1]), int(match[2] or 0)
