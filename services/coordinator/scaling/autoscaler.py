"""The autoscaler: watches the active run, asks the policy, and adds or removes rollout replicas."""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from relaxd.roles import ROLLOUT
from relaxd.rpc.errors import AlreadyExists, FailedPrecondition, NotFound
from relaxd.rpc.message_parts import numbers
from relaxd.v1 import scaling_pb2 as pb
from relaxd.v1.replica_pb2 import REPLICA_STATE_READY
from services.coordinator.fleet.registry import Replica
from services.coordinator.runs.active_run import ActiveRun
from services.coordinator.runs.run_manager import RunManager
from services.coordinator.runs.step_recorder import Usage
from services.coordinator.scaling.autoscale_policy import AutoscalePolicy, Sample, Verdict
from services.coordinator.scaling.scaler import Scaler
from services.coordinator.state.records import DRAIN_SECONDS, TIMEOUT_SECONDS, Direction, Phase, ScaleSpec

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
KEPT_DECISIONS = 100
OFF = "off"


@dataclass(frozen=True)
class Decision:
    """A decision to change the number of rollout replicas."""

    time: float
    """Unix time of the decision."""
    before: int
    after: int
    reason: str
    request_id: str
    """Id of the scale request; empty in a dry run, or if no request was accepted."""


class Autoscaler:
    """Autoscaler of the active run. Lives in the event loop."""

    def __init__(
        self, runs: RunManager, scaler: Scaler, clock: Callable[[], float] = time.monotonic, *, by_keda: bool = False
    ) -> None:
        """`by_keda`: KEDA polls the desired number and scales the replicas itself; no scale requests are made."""
        self._runs = runs
        self._by_keda = by_keda
        self._target: int | None = None
        """Number of replicas in the last decision, for KEDA; None before a decision."""
        self._scaler = scaler
        self._clock = clock
        self._run: ActiveRun | None = None
        """Run that the policy, usage, verdict and decisions below belong to; None without a run."""
        self._policy: AutoscalePolicy | None = None
        self._usage = Usage(clock)
        self._verdict = Verdict(0, "it has not looked yet")
        self._decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)

    async def run_forever(self) -> None:
        """Check the active run once a second."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)  # idle: looks again

    async def look(self) -> None:
        """Check the active run, and add or remove replicas if the policy says so."""
        run = self._runs.active
        if run is not self._run:
            self._run, self._policy, self._usage = run, None, Usage(self._clock)
            self._decisions.clear()
        if run is None or run.autoscale_mode != "on":
            self._target = None
        if run is None or run.autoscale_mode == OFF:
            self._policy = None
            return
        if self._policy is None:
            self._policy = AutoscalePolicy(run.config.autoscale)
        sample = self._sample(run)
        self._verdict = self._policy.observe(sample)
        if self._verdict.wanted != sample.replicas:
            await self._act(run, self._policy, sample.replicas)

    def target(self) -> int:
        """Return the number of rollout replicas that the last decision demands, for KEDA.

        The current number of replicas would be wrong: while a replica restarts, it would lower the target. Raises
        FailedPrecondition before the first decision.
        """
        run = self._runs.active
        if run is None or run.autoscale_mode != "on":
            why = "there is no active run" if run is None else f"autoscale.mode is {run.autoscale_mode!r}, not 'on'"
            raise FailedPrecondition(f"no number of rollout replicas: {why}")
        if run is not self._run or self._target is None:
            raise FailedPrecondition("no number of rollout replicas: nothing was decided since it is on")
        return self._target

    def describe(self, run: ActiveRun) -> pb.Autoscaler:
        """Return the message about the autoscaler: limits, wanted number of replicas, conditions and decisions."""
        settings, verdict = run.config.autoscale, self._verdict
        live = len(self._scaler.live(ROLLOUT))
        message = pb.Autoscaler(
            run_id=run.record.run_id,
            mode=numbers(pb.AutoscaleMode)[run.autoscale_mode],
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            replicas=live,
            wanted_replicas=live,
            reason="it is off",
        )
        if run is self._run and self._policy is not None and run.autoscale_mode != OFF:
            message.wanted_replicas, message.reason = verdict.wanted, verdict.reason
            for one in verdict.conditions:
                direction = pb.SCALE_DIRECTION_OUT if one.rule == "out" else pb.SCALE_DIRECTION_IN
                values = {"value": one.value, "threshold": one.threshold, "above": one.above, "holds": one.holds}
                message.conditions.add(direction=direction, name=one.name, **values)
        for decision in reversed(self._decisions if run is self._run else ()):
            decided = Timestamp()
            decided.FromNanoseconds(int(decision.time * 1e9))
            message.decisions.add(
                decide_time=decided,
                replicas=decision.before,
                wanted_replicas=decision.after,
                reason=decision.reason,
                request_id=decision.request_id,
            )
        return message

    def _sample(self, run: ActiveRun) -> Sample:
        """Return a sample of the run's state for the policy."""
        live = self._scaler.live(ROLLOUT)
        measured = self._usage.take(live).metrics
        busy, idle = measured.get("engine_busy_share"), measured.get("engine_idle_share")
        snapshot = run.waiting.snapshot
        queue = next((one for one in snapshot.queues if one.stage == "rollout"), None) if snapshot else None
        gauges = [replica.status.gauges for replica in live]
        return Sample(
            at=self._clock(),
            replicas=len(live),
            removable=sum(self._by_keda or bool(replica.launch_id) for replica in live),
            # Engines that are paused for weights are neither busy nor idle.
            busy=busy / (busy + idle) if busy is not None and idle is not None and busy + idle else None,
            lacking=snapshot is not None and snapshot.lacking > 0,
            waiting=(queue.waiting if queue else 0) + sum(int(one.get("waiting_samples", 0)) for one in gauges),
            gate=snapshot.gate[0] if snapshot is not None else "",
            tokens_per_second=sum(one.get("tokens_per_second", 0.0) for one in gauges),
            hold=self._hold(run, live),
        )

    def _hold(self, run: ActiveRun, live: list[Replica]) -> str:
        """Return why no scaling decision is possible now; "" if one is possible."""
        if run.record.phase != Phase.RUNNING or run.waiting.snapshot is None:
            return "the run isn't training"
        if run.record.paused is not None:
            return f"the run is paused: {run.record.paused}"
        if run.waiting.redis_is_away:
            return "Redis doesn't answer"
        current = [one for one in self._scaler.log.in_progress() if one.spec.role == ROLLOUT]
        if current:
            return f"scale request {current[0].request_id} is in progress"
        unready = [one.replica_id for one in live if one.status.state != REPLICA_STATE_READY]
        return f"{unready[0]} isn't ready" if unready else ""

    async def _act(self, run: ActiveRun, policy: AutoscalePolicy, replicas: int) -> None:
        """Add or remove replicas as the verdict says; with mode "dry_run", only report it."""
        verdict, request_id, reason = self._verdict, "", self._verdict.reason
        out = verdict.wanted > replicas
        if run.autoscale_mode == "on" and not self._by_keda:
            spec = ScaleSpec(
                direction=Direction.OUT if out else Direction.IN,
                role=ROLLOUT,
                replicas=verdict.wanted,
                seconds=TIMEOUT_SECONDS if out else DRAIN_SECONDS,
            )
            try:
                request_id = (await self._scaler.accept(f"auto-{secrets.token_hex(3)}", spec)).request_id
            except (AlreadyExists, FailedPrecondition, NotFound) as error:
                reason = f"{reason}, but it was refused: {error}"
        elif run.autoscale_mode == "on":
            self._target = verdict.wanted
        policy.acted(verdict)
        self._decisions.append(Decision(time.time(), replicas, verdict.wanted, reason, request_id))
        said = "" if request_id else " (KEDA's to do)" if self._target is not None else " (not done)"
        logger.info("autoscaler: %d to %d rollout replicas%s: %s", replicas, verdict.wanted, said, reason)
