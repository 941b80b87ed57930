"""The streams WatchRun, limited in time and resumable by token, and WatchReplicas: first all replicas of a role, then
the changed ones."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from relaxd.board.committed_steps import CommittedSteps
from relaxd.client.run_changes import changes
from relaxd.rpc.errors import Violations
from relaxd.rpc.message_parts import MAX_WATCH_SECONDS, watch_seconds
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2 import CallableReplica, WatchReplicasResponse
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from relaxd.waiting import steady_time
from services.coordinator.fleet.registry import Registry, Replica, Signal
from services.coordinator.runs.run_manager import RunDigest, RunManager
from services.coordinator.runs.run_messages import event_messages, step_messages
from services.coordinator.runs.starting import check_run_id
from services.coordinator.state.records import RunRecord
from services.coordinator.state.store import read_in_thread

TOKEN = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", re.ASCII)
TICK_SECONDS = 0.25
SILENCE_SECONDS = 1.0
"""Maximum seconds between two messages to a watcher."""
STEPS_AT_ONCE = 200
"""Maximum number of steps in one message. A watcher may have missed many when it resumes after a long time."""
SELDOM_NEW: tuple[Literal["config_json", "health"], ...] = ("config_json", "health")
"""Large fields of a run that are omitted from a message with the whole run if they haven't changed."""


@dataclass(frozen=True)
class _Read:
    """One read of a run's message from Redis, in progress or done."""

    glance: RunDigest
    began: float
    message: "asyncio.Task[pb.Run]"

    def serves(self, glance: RunDigest, now: float) -> bool:
        """Return True if the read was for this digest, and is in progress or less than TICK_SECONDS old."""
        if self.glance != glance or not self.message.done():
            return self.glance == glance
        failed = self.message.cancelled() or self.message.exception() is not None
        return not failed and now - self.began < TICK_SECONDS


class RunFeed:
    """Produces the messages of WatchRun. All watchers of a run share one read from Redis."""

    def __init__(self, manager: RunManager) -> None:
        self._manager = manager
        self._reads: dict[str, _Read] = {}

    async def message(self, record: RunRecord, glance: RunDigest) -> pb.Run:
        """Return a run's message that is at most TICK_SECONDS old and not older than the digest. Raises Unavailable."""
        now = time.monotonic()
        self._reads = {run_id: read for run_id, read in self._reads.items() if now - read.began < MAX_WATCH_SECONDS}
        read = self._reads.get(record.run_id)
        if read is None or not read.serves(glance, now):
            read = _Read(glance, now, asyncio.create_task(self._manager.message(record)))
            read.message.add_done_callback(_look_at_error)
            self._reads[record.run_id] = read
        return await asyncio.shield(read.message)

    async def watch(self, changed: Signal, request: pb.WatchRunRequest) -> AsyncIterator[pb.WatchRunResponse]:
        """Yield a run's state at once, at every visible change and at least every second, until the time or the run
        ends.

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
    """Return the next message for a watcher to whom the state `before` was sent last.

    gRPC asks for the next message when the watcher has room for it, so a watcher who reads slowly gets merged changes.
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
    """Retrieve the error of a read that no watcher awaits any more, so that asyncio doesn't log it."""
    if not task.cancelled():
        task.exception()


def _parts(token: str) -> tuple[int | None, int | None]:
    """Split a resume token into the last step and the last event that were sent; None without a token: from now on."""
    match = TOKEN.fullmatch(token)
    if match is None:
        return None, None
    return int(match[1]), int(match[2] or 0)


LOOK_SECONDS = 1.0
"""Maximum seconds between two checks of the registry.

Some changes, such as of a replica's detail, come without a signal.
"""
MAX_GONE = 1000
"""Maximum number of removed replicas per role to remember."""


class RoleChanges:
    """Tracks the replicas of a role: their state at the last check, and the number of each replica's last change.

    One check serves all watchers. Watchers that have seen the same change number get the same message.
    """

    def __init__(self) -> None:
        self.changed = Signal()
        self.number = self._oldest = int(steady_time() * 1e6)
        """Number of the last change. It starts at the Unix time in microseconds, above all numbers of earlier
        coordinators."""
        self._replicas: dict[str, tuple[int, CallableReplica]] = {}
        self._gone: dict[str, int] = {}
        """Number of the change that removed each replica, by replica id, in order."""
        self._messages: dict[int, WatchReplicasResponse] = {}
        """Cached messages by the change number after which they begin. Each message has all changes up to `number`."""

    def look(self, replicas: Iterable[Replica]) -> None:
        """Record which of the given replicas were added, changed or removed since the last check, and wake the
        watchers."""
        number = self.number + 1
        now = {replica.replica_id: callable_replica(replica) for replica in replicas}
        gone = self._replicas.keys() - now.keys()
        new = {name: one for name, one in now.items() if name not in self._replicas or self._replicas[name][1] != one}
        if not gone and not new:
            return
        for name in gone:
            del self._replicas[name]
        self._replicas |= {name: (number, one) for name, one in new.items()}
        self._gone = {name: went for name, went in self._gone.items() if name not in new} | dict.fromkeys(gone, number)
        while len(self._gone) > MAX_GONE:
            self._oldest = self._gone.pop(next(iter(self._gone)))
        self.number, self._messages = number, {}
        self.changed.fire()

    def since(self, number: int) -> WatchReplicasResponse:
        """Return the changes after change number `number`, or all replicas if those changes aren't known."""
        if complete := not self._oldest <= number <= self.number:
            number = 0
        if number not in self._messages:
            self._messages[number] = WatchReplicasResponse(
                change=self.number,
                complete=complete,
                replicas=[one for changed, one in self._replicas.values() if complete or changed > number],
                gone=[] if complete else [name for name, went in self._gone.items() if went > number],
            )
        return self._messages[number]


class ReplicaFeed:
    """Produces the messages of WatchReplicas. Lives in the event loop."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._roles: dict[str, RoleChanges] = {}
        """Changes of each role's replicas, for every role watched so far."""

    async def look_forever(self) -> None:
        """Look for changed replicas whenever the registry signals a change, and at least every LOOK_SECONDS."""
        news = self._registry.changed.follow()
        while True:
            for role, seen in self._roles.items():
                seen.look(self._registry.of_role(role))
            await news.wait(LOOK_SECONDS)  # idle: nothing is new

    async def watch(self, role: str, after: int, seconds: float) -> AsyncIterator[WatchReplicasResponse]:
        """Yield the changes of a role's replicas after change number `after` at once, then each further change for
        `seconds`."""
        end = time.monotonic() + seconds
        if role not in self._roles:
            self._roles[role] = RoleChanges()
            self._roles[role].look(self._registry.of_role(role))
        seen = self._roles[role]
        message = seen.since(after)
        yield message
        while (left := end - time.monotonic()) > 0:
            if seen.number == message.change:
                await seen.changed.wait(left)  # idle: nothing is new
            else:
                message = seen.since(message.change)
                yield message


def callable_replica(replica: Replica) -> CallableReplica:
    """Return the message that tells a replica's callers about the replica."""
    status = replica.status
    weights = status.weights if status.HasField("weights") else None
    return CallableReplica(
        replica_id=replica.replica_id,
        address=replica.registration.address,
        state=status.state,
        run_id=status.run_id,
        weights=weights,
        detail="" if status.state == REPLICA_STATE_READY and weights is not None else status.detail,
    )
