"""Watches what the active run waits for: takes a snapshot every second, explains it, and logs long waits."""

import asyncio
import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from relaxd.board import BoardError
from relaxd.roles import ROLES
from relaxd.v1 import coordinator_pb2 as pb
from relaxd.waiting import waits
from services.coordinator.fleet.registry import Replica
from services.coordinator.fleet.run_fleet import RunContext
from services.coordinator.runs.wait_reasons import Named, Peer, Reason, RunSnapshot, evidence, explain, is_late

logger = logging.getLogger(__name__)

TICK_SECONDS = 1.0
FIRST_LOG_SECONDS = 10.0
"""Seconds after which a wait is logged: shorter waits are common at a run's start."""
LOG_SECONDS = 60.0
"""Seconds between two log lines about the same wait."""
CLOCKS_DIFFER_SECONDS = 600.0
"""Maximum seconds that Redis's clock may be ahead. If a step ended further in the future, the clock was set back."""
USUAL_STEPS = 20
"""Number of recent steps whose durations give the usual duration of a step."""
ESTIMATE_STEPS = 3
"""Minimum number of steps before the remaining time is shown: the first step is slow, and two have no median."""


class WaitWatcher:
    """Keeps `reason`, the reason why one run waits, up to date. Lives in the event loop."""

    def __init__(self, context: RunContext, describe: Callable[[], dict[str, Any]]) -> None:
        """`describe` returns those fields of the RunSnapshot that only the active run knows."""
        self._context = context
        self._describe = describe
        self._steps: list[tuple[int, float, float]] = []
        """The last USUAL_STEPS steps: number, Unix time of the commit, duration in seconds."""
        self._progress: dict[str, Any] = {}
        """Fields of the RunSnapshot that were last read from Redis."""
        self._logged: tuple[pb.WaitKind.ValueType, float] = (pb.WAIT_KIND_UNSPECIFIED, 0.0)
        """Kind of the last logged reason, and the monotonic time of its log line."""
        self.snapshot: RunSnapshot | None = None
        self.reason: Reason | None = None
        """The run's present wait, even if such a wait is usual; None if the run waits for nothing."""

    async def run_forever(self) -> None:
        """Take and explain a snapshot of the run once a second."""
        while True:
            await self.look()
            await asyncio.sleep(TICK_SECONDS)  # idle: looks again

    async def look(self) -> None:
        """Take a snapshot of the run, and explain what the run waits for."""
        try:
            self._progress = await self._read_board()
            redis = ""
        except BoardError as error:
            redis = str(error)
        self._update(redis)

    def refresh(self) -> None:
        """Explain the wait again from the coordinator's state, for instance after a pause, without reading Redis."""
        if self.snapshot is not None:
            self._update(self.snapshot.redis)

    def _update(self, redis: str) -> None:
        self.snapshot = self._complete(redis)
        reason, before = explain(self.snapshot), self.reason
        if reason is not None and reason.since is None:
            same = before is not None and (before.kind, before.on) == (reason.kind, reason.on)
            reason = replace(reason, since=before.since if same and before is not None else self.snapshot.now)
        self.reason = reason
        self._log()

    @property
    def redis_is_away(self) -> bool:
        """True if Redis did not answer for the last snapshot."""
        return self.snapshot is not None and bool(self.snapshot.redis)

    @property
    def sentence(self) -> str:
        """Sentence about the wait that delays the run; empty while steps end as usual."""
        if self.reason is None or self.snapshot is None:
            return ""
        shown = self.reason.always or is_late(self.snapshot)
        return self.reason.sentence(time.time()) if shown else ""

    def describe(self, run: pb.Run) -> None:
        """Add the wait, its evidence and the remaining time to the message about a run."""
        if self.snapshot is None:
            return
        run.waiting_for = self.sentence
        run.wait.evidence.extend(evidence(self.snapshot))
        if self.reason is not None:
            run.wait.current_kind, run.wait.current_on = self.reason.kind, self.reason.on
        if self.reason is not None and run.waiting_for:
            run.wait.kind, run.wait.on = self.reason.kind, self.reason.on
            run.wait.start_time.FromNanoseconds(int((self.reason.since or self.snapshot.now) * 1e9))
            run.wait.advice.extend(self.reason.advice)
        usual = self.snapshot.usual_seconds
        if usual is not None and len(self._steps) >= ESTIMATE_STEPS and not self.snapshot.stopping:
            run.remaining_seconds = usual * (self.snapshot.steps - self.snapshot.step)

    async def _read_board(self) -> dict[str, Any]:
        """Read those fields of the snapshot that are in Redis."""
        board = self._context.board
        counts = await board.counts()
        known = max(self._steps[-1][0] if self._steps else 0, counts.last_step - USUAL_STEPS)
        if counts.last_step > known:
            ledger = await board.ledger(known)
            new = [(one.step, one.time, one.metrics.get("step_seconds", 0.0)) for one in ledger]
            self._steps = [*self._steps, *new][-USUAL_STEPS:]
        return {
            "step": counts.last_step,
            "published": counts.published,
            "open": counts.open,
            "dropped": counts.dropped_by_reason,
            "queues": await board.queues(),
            "held": await board.oldest_held(),
        }

    def _complete(self, redis: str) -> RunSnapshot:
        """Return a snapshot from the fields read from Redis and the coordinator's own state. `redis`: why Redis doesn't
        answer."""
        now, config, fleet = time.time(), self._context.config, self._context.fleet
        own = self._describe()
        going_since = own.pop("going_since")
        ended = self._steps[-1][1] if self._steps else 0.0
        ended = ended if ended <= now + CLOCKS_DIFFER_SECONDS else 0.0
        values = {
            "run_id": self._context.run_id,
            "now": now,
            "steps": config.run.steps,
            "groups_per_step": config.trainer.groups_per_step,
            "step_ended": max(going_since, ended),
            "usual_seconds": statistics.median(seconds for _, _, seconds in self._steps) if self._steps else None,
            "lease_seconds": config.board.lease_seconds,
            "missing": fleet.missing(),
            "stage_roles": {role.stage: role.name for role in ROLES.values() if role.works_on(role.stage, config)},
            "peers": [_peer(replica) for role in fleet.roles for replica in self._replicas(role)],
            "waits": [Named(one.reason, one.on, now - one.seconds, one.disk) for one in waits()],
        }
        return RunSnapshot(**{**values, **self._progress, **own, "redis": redis or own["redis"]})

    def _replicas(self, role: str) -> list[Replica]:
        """Return the replicas of a role that work on this run or on none yet, without standbys."""
        fleet, runs = self._context.fleet, ("", self._context.run_id)
        found = [replica for replica in fleet.registry.of_role(role) if replica.status.run_id in runs]
        return [replica for replica in found if not fleet.idle_reason(replica.replica_id)]

    def _log(self) -> None:
        sentence, now = self.sentence, time.monotonic()
        lasts = self.reason is not None and time.time() - (self.reason.since or 0.0) >= FIRST_LOG_SECONDS
        kind = self.reason.kind if self.reason is not None and sentence and lasts else pb.WAIT_KIND_UNSPECIFIED
        last_kind, last_time = self._logged
        if not kind and last_kind:
            logger.info("run %s: goes on", self._context.run_id)
        elif kind and (kind != last_kind or now - last_time >= LOG_SECONDS):
            logger.warning("run %s: %s", self._context.run_id, sentence)
        else:
            return
        self._logged = (kind, now)


def _peer(replica: Replica) -> Peer:
    return Peer(
        replica_id=replica.replica_id,
        role=replica.registration.role,
        state=replica.status.state,
        detail=replica.status.detail,
        wait=replica.status.wait,
        silent_seconds=max(0.0, time.monotonic() - replica.seen),
        version=replica.version[1] if replica.version is not None else None,
    )
