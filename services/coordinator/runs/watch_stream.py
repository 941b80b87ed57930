"""The WatchRun stream: limited in time, resumable by token."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaxd.board.committed_steps import CommittedSteps
from relaxd.client.run_changes import changes
from relaxd.rpc.errors import Violations
from relaxd.rpc.message_parts import MAX_WATCH_SECONDS, watch_seconds
from relaxd.v1 import coordinator_pb2 as pb
from services.coordinator.fleet.changes import Signal
from services.coordinator.runs.run_manager import RunDigest, RunManager
from services.coordinator.runs.run_messages import event_messages, step_messages
from services.coordinator.runs.starting import check_run_id
from services.coordinator.state.records import RunRecord
from services.coordinator.state.store import read_in_thread

TOKEN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
TICK_SECONDS = 0.25
SILENCE_SECONDS = 1.0
"""Maximum seconds between two messages."""
STEPS_AT_ONCE = 200
"""Maximum number of steps in one message: a watcher may resume after a long time."""
SELDOM_NEW: tuple[Literal["config_json", "health"], ...] = ("config_json", "health")
"""Large fields of a run that are omitted from a message with the whole run if they haven't changed."""


@dataclass(frozen=True)
class _Read:
    """One read of a run's message, in progress or done."""

    glance: RunDigest
    began: float
    message: "asyncio.Task[pb.Run]"

    def serves(self, glance: RunDigest, now: float) -> bool:
        """Return True if the read has this digest and is in progress or less than TICK_SECONDS old."""
        if self.glance != glance or not self.message.done():
            return self.glance == glance
        failed = self.message.cancelled() or self.message.exception() is not None
        return not failed and now - self.began < TICK_SECONDS


class RunFeed:
    """Produces the messages of WatchRun; all watchers of a run share one read of Redis."""

    def __init__(self, manager: RunManager) -> None:
        self._manager = manager
        self._reads: dict[str, _Read] = {}

    async def message(self, record: RunRecord, glance: RunDigest) -> pb.Run:
        """Return a message that is at most TICK_SECONDS old and not older than the digest. Raises Unavailable."""
        now = time.monotonic()
        self._reads = {run_id: read for run_id, read in self._reads.items() if now - read.began < MAX_WATCH_SECONDS}
        read = self._reads.get(record.run_id)
        if read is None or not read.serves(glance, now):
            read = _Read(glance, now, asyncio.create_task(self._manager.message(record)))
            read.message.add_done_callback(_look_at_error)
            self._reads[record.run_id] = read
        return await asyncio.shield(read.message)

    async def watch(self, changed: Signal, request: pb.WatchRunRequest) -> AsyncIterator[pb.WatchRunResponse]:
        """Yield the run at once, at every visible change and at least every second, until the time or the run ends.

        The resume token contains the last step sent and, if there was one, the last event: "7", "7-2".
        """
        violations = Violations()
        check_run_id(request.run_id, violations)
        token = request.resume_token
        valid = not token or TOKEN.fullmatch(token)
        violations.check(valid, "resume_token", "must be empty or a token from an earlier message")
        seconds = watch_seconds(request.max_seconds, violations)
        violations.raise_if_any()
        manager = self._manager
        record = await manager.record(request.run_id)
        committed = CommittedSteps(manager.board(record).in_threads.ledger, Path(record.folder))
        end = time.monotonic() + seconds
        last_step, last_event = _parts(token)
        shown, silent_since, sent = None, 0.0, None
        while True:
            record = await manager.record(record.run_id)
            glance = manager.glance(record)
            events = await manager.events(record)
            newest_event = events[-1].number if events else 0
            last_event = newest_event if last_event is None else last_event
            over = record.phase.ended or time.monotonic() >= end
            silent = time.monotonic() - silent_since >= SILENCE_SECONDS - TICK_SECONDS
            complete = True
            if (glance, newest_event) != shown or over or silent:
                run = await self.message(record, glance)
                last_step = run.step if last_step is None else last_step
                steps = []
                if run.step > last_step:
                    steps = await read_in_thread(step_messages, committed, last_step, STEPS_AT_ONCE)
                    last_step = steps[-1].step if steps else last_step
                complete = last_step >= run.step or not steps  # none: the board is being deleted
                news, last_event = event_messages(events, last_event), newest_event
                token = f"{last_step}-{last_event}" if last_event else str(last_step)
                response = _message(sent, run, only_changes=request.only_changes)
                response.resume_token = token
                response.steps.extend(steps)
                response.events.extend(news)
                sent = run
                yield response
                shown, silent_since = (glance, newest_event), time.monotonic()
                if over and complete:
                    return
                if not complete:
                    shown = None
            if complete:
                await changed.wait(TICK_SECONDS)  # idle: nothing is new


def _message(before: pb.Run | None, run: pb.Run, *, only_changes: bool) -> pb.WatchRunResponse:
    """Return the message for a watcher who was sent `before` last.

    gRPC asks for the next message when the watcher has room for it, so one who reads slowly gets merged changes.
    """
    if before is not None and only_changes:
        return changes(before, run)
    response = pb.WatchRunResponse(run=run)
    for field in SELDOM_NEW if before is not None else ():
        value = getattr(run, field)
        if value and value == getattr(before, field):
            response.run.ClearField(field)
            response.unchanged.append(field)
    return response


def _look_at_error(task: "asyncio.Task[pb.Run]") -> None:
    """Retrieve the error of a read whose watchers have all left, so that asyncio doesn't log it."""
    if not task.cancelled():
        task.exception()


def _parts(token: str) -> tuple[int | None, int | None]:
    """Split a resume token into step and event; None: from now on."""
    match = TOKEN.fullmatch(token)
    if match is None:
        return None, None
    return int(match[1]), int(match[2] or 0)
