"""Sends the changes of runs to pages as events. All pages that show a run share one WatchRun call.

A page that reads slowly gets only the newest state of each topic, so memory doesn't grow with events.
"""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from relaxd.client.coordinator_client import ENDED
from relaxd.client.run_changes import merge
from relaxd.rpc.errors import explain
from relaxd.rpc.message_parts import plain, words
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.v1.coordinator_pb2_grpc import CoordinatorStub
from relaxd.v1.replica_pb2 import ReplicaState

WATCH_SECONDS = 60.0
SILENCE_SECONDS = 10.0
"""Seconds without a message of WatchRun after which the coordinator counts as away. WatchRun sends one every second."""
AGAIN_SECONDS = 0.5
"""Seconds between two attempts to reach the coordinator."""
ENDED_SECONDS = 5.0
"""Seconds between two checks of an ended run, which may be resumed."""
FLEET_SECONDS = 2.0
"""Seconds between two reads of the replicas and weights from the coordinator."""
CALL_SECONDS = 10.0
"""Deadline of a call to the coordinator, in seconds."""
EVENT_SECONDS = 0.25
"""Minimum seconds between two events that a page gets on the same topic."""
SILENT_SECONDS = 3.0
"""Seconds without a heartbeat after which the page shows a replica as silent."""
KEEPALIVE_SECONDS = 15.0
LINGER_SECONDS = 30.0
"""Seconds for which a run is followed after its last page was closed."""
SHOWN_EVENTS = 50
"""Maximum number of past health events that a new page gets."""
MAX_REPLICAS = 5000

_log = logging.getLogger(__name__)

Event = tuple[str, str]
"""A topic and its state as JSON. An event with an empty topic only keeps the connection alive."""


class FollowedRun:
    """Follows one run, and keeps the newest state of each of the run's topics."""

    def __init__(self, stub: CoordinatorStub, run_id: str) -> None:
        self._stub = stub
        self._run_id = run_id
        self._topics: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._changed = asyncio.Condition()
        self._events: deque[dict[str, Any]] = deque(maxlen=SHOWN_EVENTS)
        self._away_since: float | None = None
        self.readers = 0
        """Number of pages that show the run now."""
        self.left_at = time.monotonic()
        """Monotonic time at which the last page was closed, in seconds."""
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._look_at_fleet())]

    async def close(self) -> None:
        """Stop following the run."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def events(self) -> AsyncIterator[Event]:
        """Yield the current state of all topics, then the new state of each topic that changes."""
        seen: dict[str, int] = {}
        while True:
            for topic, number in list(self._numbers.items()):
                if seen.get(topic) != number:
                    seen[topic] = number
                    yield topic, self._topics[topic]
            if not await self._await_news(seen):
                yield "", ""
            await asyncio.sleep(EVENT_SECONDS)  # idle: changes that follow closely become one event

    async def _await_news(self, seen: dict[str, int]) -> bool:
        """Wait until a topic's state has changed. Returns False if none has within KEEPALIVE_SECONDS."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KEEPALIVE_SECONDS), self._changed:
                await self._changed.wait_for(lambda: self._numbers != seen)
                return True
        return False

    async def _set(self, topic: str, state: Any) -> None:
        """Set the state of a topic, and wake the pages if the state changed."""
        text = json.dumps(state, separators=(",", ":"), allow_nan=False)
        if self._topics.get(topic) == text:
            return
        self._count += 1
        self._topics[topic], self._numbers[topic] = text, self._count
        async with self._changed:
            self._changed.notify_all()

    async def _watch(self) -> None:
        """Keep the run's topics up to date, forever. Reconnect whenever the coordinator doesn't answer."""
        token, run = "", pb.Run()
        while True:
            request = pb.WatchRunRequest(
                run_id=self._run_id, resume_token=token, max_seconds=WATCH_SECONDS, only_changes=True
            )
            try:
                messages = aiter(self._stub.WatchRun(request, timeout=WATCH_SECONDS + SILENCE_SECONDS))
                run = pb.Run()
                while True:
                    async with asyncio.timeout(SILENCE_SECONDS):
                        message = await anext(messages, None)
                    if message is None:
                        break
                    run, token = merge(run, message), message.resume_token
                    self._events.extend(map(plain, message.events))
                    await self._show(run)
                if run.state in ENDED:
                    await asyncio.sleep(ENDED_SECONDS)  # idle: it may be resumed
            except (grpc.aio.AioRpcError, TimeoutError) as error:
                await self._say_away(error)
                await asyncio.sleep(AGAIN_SECONDS)  # named: the page says that the coordinator is away

    async def _show(self, run: pb.Run) -> None:
        self._away_since = None
        await self._set("connection", {"away_since": None, "reason": ""})
        await self._set("run", plain(run, without=("config_json", "health", "metrics")))
        await self._set("metrics", {"step": run.step, "values": numbers(run.metrics)})
        await self._set("health", [plain(one) for one in run.health])
        await self._set("events", list(self._events))

    async def _say_away(self, error: Exception) -> None:
        if self._away_since is None:
            self._away_since = time.time()
        reason = explain(error) if isinstance(error, grpc.RpcError) else f"silent for {SILENCE_SECONDS:.0f} s"
        await self._set("connection", {"away_since": self._away_since, "reason": reason})

    async def _look_at_fleet(self) -> None:
        """Read the topics "fleet" and "weights" from the coordinator every FLEET_SECONDS."""
        while True:
            try:
                await self._set("fleet", fleet_form(await all_replicas(self._stub)))
                weights = await self._stub.GetWeights(pb.GetWeightsRequest(run_id=self._run_id), timeout=CALL_SECONDS)
                await self._set("weights", plain(weights, without=("engines",)))
            except grpc.aio.AioRpcError as error:
                _log.debug("cannot look at the replicas of %s: %s", self._run_id, explain(error))
            await asyncio.sleep(FLEET_SECONDS)  # idle: looks again


async def all_replicas(stub: CoordinatorStub) -> list[pb.RegisteredReplica]:
    """Return all registered replicas, at most MAX_REPLICAS. Raises AioRpcError."""
    found: list[pb.RegisteredReplica] = []
    request = pb.ListReplicasRequest(page_size=1000)
    while len(found) < MAX_REPLICAS:
        page = await stub.ListReplicas(request, timeout=CALL_SECONDS)
        found += page.replicas
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    return found


class LiveChanges:
    """Follows the runs that pages show now."""

    def __init__(self, stub: CoordinatorStub) -> None:
        self._stub = stub
        self._runs: dict[str, FollowedRun] = {}

    @asynccontextmanager
    async def follow(self, run_id: str) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield an iterator of a run's events for one page."""
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = FollowedRun(self._stub, run_id)
        run.readers += 1
        try:
            yield run.events()
        finally:
            run.readers -= 1
            run.left_at = time.monotonic()

    async def close_left_ones(self) -> None:
        """Stop following runs that no page has shown for LINGER_SECONDS."""
        now = time.monotonic()
        for run_id, run in list(self._runs.items()):
            if not run.readers and now - run.left_at > LINGER_SECONDS:
                del self._runs[run_id]
                await run.close()

    async def close(self) -> None:
        """Stop following all runs."""
        runs, self._runs = list(self._runs.values()), {}
        await asyncio.gather(*(run.close() for run in runs))


def numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return a mapping's entries with finite values, because JSON has no other numbers."""
    return {name: value for name, value in values.items() if math.isfinite(value)}


def fleet_form(replicas: Sequence[pb.RegisteredReplica]) -> dict[str, list[Any]]:
    """Return all replicas as columns, one per field.

    This form is compact enough to send hundreds of replicas every few seconds.
    """
    states = words(ReplicaState)
    return {
        "id": [one.registration.replica_id for one in replicas],
        "role": [one.registration.role for one in replicas],
        "state": [states[one.status.state] for one in replicas],
        "version": [one.status.weights.version if one.status.HasField("weights") else None for one in replicas],
        "held": [one.status.held_groups for one in replicas],
        "done": [one.status.done_groups for one in replicas],
        "gpus": [len(one.leased_gpu_uuids) for one in replicas],
        "silent": [round(one.heartbeat_age_seconds) * (one.heartbeat_age_seconds > SILENT_SECONDS) for one in replicas],
    }
